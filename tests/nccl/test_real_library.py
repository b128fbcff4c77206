"""The real NCCL of the nvidia-nccl wheel: what can be seen of it without a GPU.

It loads without a driver; version and unique ids work; making a communicator fails in its own
words. Its header is compared with the binding's own declarations by the compiler.
"""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pyparallel._core import nccl as core
from pyparallel.comm import nccl
from tests.nccl.libraries import ROOT, Libraries, code_of


def wheel() -> Path:
    spec = find_spec("nvidia.nccl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no nvidia-nccl wheel is installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def library():
    return nccl.open_library(wheel() / "lib/libnccl.so.2")


def header_version() -> int:
    text = (wheel() / "include/nccl.h").read_text()
    found = re.search(r"#define NCCL_VERSION_CODE (\d+)", text)
    assert found is not None
    return int(found[1])


def test_version_is_its_header_s(library) -> None:
    assert library.version == header_version()


def test_features(library) -> None:
    """The list's versions agree with what this release has."""
    expected = {name for name, since, _ in core.symbols() if code_of(since) > library.version}
    assert set(library.missing) == expected


def test_unique_ids(library) -> None:
    ids = {nccl.unique_id(library) for _ in range(3)}
    assert len(ids) == 3
    assert {len(id) for id in ids} == {128}


@pytest.mark.parametrize("blocking", [False, True])
def test_communicator_without_a_driver(library, blocking: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(nccl.NcclResultError) as raised:
        nccl.NcclCommunicator(
            *(nccl.unique_id(library), 0, 1),
            name="tp",
            timeout=20,
            blocking=blocking,
            library=library,
        )
    text = str(raised.value)
    assert text.startswith("creating communicator tp (rank 0 of 1) failed: nccl")
    assert "NCCL's last error: " in text
    assert library.path in text


def test_memory_without_a_driver(library) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(nccl.NcclResultError, match=r"ncclMemAlloc\(4096 bytes\) failed"):
        nccl.NcclMemory(4096, library=library)


ABI_CHECK = r"""
#include <type_traits>
#include "nccl.h"
#include "nccl/symbols.h"
#include "nccl/types.h"

namespace ours = pyparallel::nccl;

// Parameter by parameter: the same size, and pointers where pointers are.
template <typename A, typename B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
template <typename A, typename B>
struct Same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct Same<R (*)(A...), S (*)(B...)> {
  template <bool equal = sizeof...(A) == sizeof...(B)>
  static constexpr bool check() {
    if constexpr (equal) {
      return alike<R, S> && (alike<A, B> && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = check();
};
#define CHECK(name, major, minor, patch, presence, result, parameters)                          \
  static_assert(NCCL_VERSION(major, minor, patch) > NCCL_VERSION_CODE ||                        \
                    Same<decltype(&nccl##name), decltype(ours::Functions::name)>::value, #name);
PYPARALLEL_NCCL_SYMBOLS(CHECK)

static_assert(sizeof(ncclUniqueId) == sizeof(ours::UniqueId));
#define VALUE(theirs, our) static_assert(static_cast<int>(theirs) == static_cast<int>(our))
VALUE(ncclUnhandledCudaError, ours::Result::unhandled_cuda_error);
VALUE(ncclSystemError, ours::Result::system_error);
VALUE(ncclInternalError, ours::Result::internal_error);
VALUE(ncclInvalidArgument, ours::Result::invalid_argument);
VALUE(ncclInvalidUsage, ours::Result::invalid_usage);
VALUE(ncclRemoteError, ours::Result::remote_error);
VALUE(ncclInProgress, ours::Result::in_progress);
VALUE(ncclInt8, ours::DataType::i8);
VALUE(ncclUint8, ours::DataType::u8);
VALUE(ncclInt32, ours::DataType::i32);
VALUE(ncclUint32, ours::DataType::u32);
VALUE(ncclInt64, ours::DataType::i64);
VALUE(ncclUint64, ours::DataType::u64);
VALUE(ncclFloat16, ours::DataType::f16);
VALUE(ncclFloat32, ours::DataType::f32);
VALUE(ncclFloat64, ours::DataType::f64);
VALUE(ncclBfloat16, ours::DataType::bf16);
VALUE(ncclFloat8e4m3, ours::DataType::f8e4m3);
VALUE(ncclFloat8e5m2, ours::DataType::f8e5m2);
VALUE(ncclSum, ours::RedOp::sum);
VALUE(ncclProd, ours::RedOp::product);
VALUE(ncclMax, ours::RedOp::max);
VALUE(ncclMin, ours::RedOp::min);
VALUE(ncclAvg, ours::RedOp::avg);
VALUE(ncclScalarHostImmediate, ours::ScalarResidence::host);
VALUE(NCCL_SPLIT_NOCOLOR, ours::split_no_color);
VALUE(NCCL_SHRINK_ABORT, ours::shrink_abort);
VALUE(NCCL_WIN_COLL_SYMMETRIC, ours::window_symmetric);
VALUE(NCCL_WIN_REQUIRED_ALIGNMENT, ours::window_alignment);
VALUE(NCCL_CONFIG_UNDEF_INT, ours::undefined_int);
static_assert(NCCL_API_MAGIC == ours::config_magic);
static_assert(NCCL_VERSION(2, 8, 4) == ours::version_code(2, 8, 4));
static_assert(NCCL_VERSION(2, 30, 5) == ours::version_code(2, 30, 5));
#define FIELD(theirs, our)                                                                   \
  static_assert(offsetof(ncclConfig_t, theirs) == offsetof(ours::ConfigRecord, our) &&       \
                sizeof(ncclConfig_t::theirs) == sizeof(ours::ConfigRecord::our))
FIELD(size, size);
FIELD(magic, magic);
FIELD(version, version);
FIELD(blocking, blocking);
FIELD(cgaClusterSize, cga_cluster_size);
FIELD(minCTAs, min_ctas);
FIELD(maxCTAs, max_ctas);
FIELD(netName, net_name);
FIELD(splitShare, split_share);
FIELD(trafficClass, traffic_class);
FIELD(commName, comm_name);
FIELD(collnetEnable, collnet_enable);
FIELD(CTAPolicy, cta_policy);
FIELD(shrinkShare, shrink_share);
FIELD(nvlsCTAs, nvls_ctas);
FIELD(nChannelsPerNetPeer, channels_per_net_peer);
FIELD(nvlinkCentricSched, nvlink_centric_sched);
FIELD(graphUsageMode, graph_usage_mode);
FIELD(numRmaCtx, num_rma_ctx);
FIELD(maxP2pPeers, max_p2p_peers);
FIELD(graphStreamOrdering, graph_stream_ordering);
"""


EDITS = {  # each must be found
    "as it is": None,
    "a value": ("VALUE(ncclMax, ours::RedOp::max)", "VALUE(ncclMax, ours::RedOp::min)"),
    "a field": ("FIELD(minCTAs, min_ctas)", "FIELD(minCTAs, max_ctas)"),
    "a function": ("&nccl##name)", "&ncclCommSplit)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_declarations_are_the_header_s(libraries: Libraries, tmp_path: Path, edit: str) -> None:
    """The release of the wheel against symbols.h and abi.h; edits show that a misfit is found."""
    if header_version() < 23005:
        pytest.skip("the wheel's header is older than the declarations")
    (tmp_path / "cuda_runtime.h").write_text(
        "#pragma once\n#include <cstddef>\ntypedef struct CUstream_st* cudaStream_t;\n"
        "typedef struct CUevent_st* cudaEvent_t;\n#define CUDART_VERSION 0\n"
    )
    (tmp_path / "cuda_fp16.h").write_text("#pragma once\n")
    change = EDITS[edit]
    source = ABI_CHECK if change is None else ABI_CHECK.replace(*change)
    assert change is None or source != ABI_CHECK
    (tmp_path / "check.cpp").write_text(source)
    done = subprocess.run(
        [
            *(libraries.compiler, "-std=c++17", "-fsyntax-only", "-Wno-deprecated-declarations"),
            *(f"-I{tmp_path}", f"-I{wheel() / 'include'}", f"-I{ROOT / 'csrc'}"),
            str(tmp_path / "check.cpp"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) == (change is None), done.stderr
    if change is not None:
        assert "static assertion failed" in done.stderr
