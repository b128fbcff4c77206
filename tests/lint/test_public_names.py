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
        partition_model profile
        sum_tied_gradients""",
    "pyparallel.schedule": """FAMILIES FORMS NO_MICROBATCH Action Channel Costs Family Kind Place
        Report Schedule ScheduleError Simulation Span Unit auto_schedule dumps generate grid loads
        simulate units validate with_steps with_transfers""",
    "pyparallel.simulate": "main",
    "pyparallel.viz": "chrome_trace timeline_png timeline_svg",
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
