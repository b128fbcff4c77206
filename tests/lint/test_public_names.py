"""Public names are frozen here: to add one, or to take one away, is to edit this table."""

import importlib

import pytest

ERRORS = """Aborted Closed CommError CudaError Interrupted InvalidArgument Mismatch NcclError
NoMemory PeerLost SystemCallError Timeout Unsupported"""

PUBLIC = {
    "pyparallel": "__version__ cmake_dir get_include",
    "pyparallel.errors": ERRORS,
    "pyparallel.comm": """Communicator Recv Reduction Send SymmetricMemory Work premul_sum
        Aborted Closed CommError Interrupted InvalidArgument Mismatch NoMemory PeerLost
        SystemCallError Timeout Unsupported""",
    "pyparallel.comm.nccl": """NcclCommunicator NcclConfig NcclMemory NcclMemoryStats RawArray
        Registration SignalWait Window
        group load nccl_info open_library unique_id NcclError NcclInternalError NcclInvalidArgument
        NcclInvalidUsage NcclRemoteError NcclResultError NcclSystemError NcclTimeout
        NcclUnhandledCudaError""",
    "pyparallel.attention": """AttentionEngine AttentionExplanation CoreAttention Mask Piece
        Pieces SHARDINGS
        Sharding SimulatedGroup State choose_engine engine_names explain finish
        position_ids sequence_parallel_attention shard shard_labels simulate unshard""",
    "pyparallel.attention.hugging_face": "HuggingFaceAttention register",
    "pyparallel.attention.ring_flash_attn": """llama3_flash_attn_prepare_cu_seqlens
        llama3_flash_attn_varlen_func
        llama3_flash_attn_varlen_kvpacked_func llama3_flash_attn_varlen_qkvpacked_func
        ring_flash_attn_func ring_flash_attn_kvpacked_func
        ring_flash_attn_qkvpacked_func ring_flash_attn_varlen_func
        ring_flash_attn_varlen_kvpacked_func ring_flash_attn_varlen_qkvpacked_func
        stripe_flash_attn_func stripe_flash_attn_kvpacked_func
        stripe_flash_attn_qkvpacked_func stripe_flash_attn_varlen_func
        stripe_flash_attn_varlen_kvpacked_func stripe_flash_attn_varlen_qkvpacked_func
        zigzag_ring_flash_attn_func
        zigzag_ring_flash_attn_kvpacked_func zigzag_ring_flash_attn_qkvpacked_func
        zigzag_ring_flash_attn_varlen_func zigzag_ring_flash_attn_varlen_kvpacked_func
        zigzag_ring_flash_attn_varlen_qkvpacked_func""",
    "pyparallel.layers": """ColumnParallelLinear Dropout FusedColumnParallelLinear GatedMLP
        HeadSplit LayerNorm ParallelizeReport ParameterLayout Partition QKVParallelLinear RMSNorm
        RandomStreams RowParallelLinear SequenceSharding ShardedEntry ShardedModule
        VocabParallelCrossEntropy VocabParallelEmbedding clip_gradient_norm_ full_state_dict
        gradient_norm load_full_state_dict materialize parallelize split_heads tie
        vocab_parallel_cross_entropy""",
    "pyparallel.environment": "VARIABLES Variable",
    "pyparallel.ops": """Explanation all_gather all_gather_matmul all_reduce all_reduce_
        all_reduce_rms_norm all_reduce_rms_norm_ explain gather
        group_name matmul_all_reduce matmul_all_reduce_rms_norm matmul_reduce_scatter reduce_scatter
        replicate split""",
    "pyparallel.cli": "COMMANDS main",
    "pyparallel.pipeline": """Part Partition PipelineError PipelineExecutor StepProfile StepResult
        TiedParameter balance clip_gradient_norm_ gradient_norm materialise parameters_on_meta
        partition_model profile recompute
        sum_tied_gradients""",
    "pyparallel.planner": """CLUSTERS CONVENTIONS PRECISIONS PRESETS ClusterSpec Experts FlopsReport
        Gpu Job LatentAttention Layout Linear Link MemoryReport ModelSpec Plan PlanError Precision
        Rejected SearchResult Space StageMemory TimeReport Violation cluster_named evaluate
        fewest_devices linears pipeline_costs preset search violations""",
    "pyparallel.planner.emitters": "EMITTERS SPACES Emitted emit",
    "pyparallel.planner.importers": """BrokenRule FRAMEWORKS ConfigError Imported Note
        import_configuration""",
    "pyparallel.schedule": """FAMILIES FORMS NO_MICROBATCH Action Channel Costs Family Kind Place
        Report Schedule ScheduleError Simulation Span Unit auto_schedule dumps generate grid loads
        simulate units validate with_steps with_transfers""",
    "pyparallel.launch": "main parser",
    "pyparallel.help_text": "Paragraphs",
    "pyparallel.plan": "main",
    "pyparallel.plan_files": "add_arguments emittable read show_imported unlike write",
    "pyparallel.plan_options": """check_numbers cluster_of given_sizes job_of layout_of parser""",
    "pyparallel.profile": "RankTime advice main read_traces",
    "pyparallel.simulate": "main",
    "pyparallel.training.checkpoint": """CheckpointError Checkpointer PendingSave Reader
        SaveResult export_hugging_face import_hugging_face""",
    "pyparallel.training": """AXES CheckpointError Checkpointer Compression Coordinates Crossing
        DataParallel ElasticSampler HostOffload LossScaler MetricsLog Neighbours ORDERS
        ParallelConfig ParallelMesh ParallelModel PendingSave PlacedDropout Precision RandomStreams
        SaveResult StepMemory Topology Traffic Utilization apply_recompute build_mesh check_batch
        clip_grad_norm_ data_parallel expected_step export_hugging_face global_grad_norm
        import_hugging_face measure_step measured_peak peak_bytes place_dropouts tied_copies""",
    "pyparallel.viz": """VIEWS chrome_trace plan_figure plan_page sharding_svg timeline_png
        timeline_svg""",
    "pyparallel.doctor": "main report",
}


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_names_are_those_of_the_table(module):
    found = importlib.import_module(module)
    names = found.__all__
    assert all(isinstance(name, str) for name in names)
    assert len(names) == len(set(names))
    assert set(names) == set(PUBLIC[module].split())
    assert [name for name in names if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_public_name_is_explained(module):
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if callable(value):
            assert value.__doc__, f"{module}.{name} has no docstring"
