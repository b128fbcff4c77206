// The one list of the NCCL functions that this binding calls. From it are made: the table of
// function pointers and the loader (library.cpp), the feature flags (nccl_info), the table in
// docs/nccl.md, and the stand-in libraries of the tests. To add a function: add a line here, call
// it, implement it in tests/nccl/standin, regenerate the table (docs/nccl.md says how).
//
//   X(name, major, minor, patch, presence, result type, (parameters))
//
// name      without the prefix "nccl"
// version   the first release whose public header has it; 2.3.5 also stands for "earlier"
// presence  required: a library without it is refused; optional: its absence is a feature flag
#pragma once

#include <cstddef>

#include "nccl/abi.h"

// clang-format off
#define PYPARALLEL_NCCL_SYMBOLS(X)                                                                  \
  X(GetVersion,           2,  3, 5, required, Result, (int* version))                               \
  X(GetUniqueId,          2,  3, 5, required, Result, (UniqueId* id))                               \
  X(GetErrorString,       2,  3, 5, required, const char*, (Result code))                           \
  X(CommInitRank,         2,  3, 5, required, Result,                                               \
    (RawComm* comm, int size, UniqueId id, int rank))                                               \
  X(CommDestroy,          2,  3, 5, required, Result, (RawComm comm))                               \
  X(CommCount,            2,  3, 5, required, Result, (RawComm comm, int* count))                   \
  X(CommCuDevice,         2,  3, 5, required, Result, (RawComm comm, int* device))                  \
  X(CommUserRank,         2,  3, 5, required, Result, (RawComm comm, int* rank))                    \
  X(GroupStart,           2,  3, 5, required, Result, ())                                           \
  X(GroupEnd,             2,  3, 5, required, Result, ())                                           \
  X(CommInitAll,          2,  3, 5, optional, Result,                                               \
    (RawComm* comms, int count, const int* devices))                                                \
  X(Bcast,                2,  3, 5, optional, Result,                                               \
    (void* data, std::size_t count, DataType type, int root, RawComm comm, Stream stream))          \
  X(AllReduce,            2,  3, 5, required, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, RedOp op, RawComm comm,           \
     Stream stream))                                                                                \
  X(Reduce,               2,  3, 5, required, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, RedOp op, int root, RawComm comm, \
     Stream stream))                                                                                \
  X(Broadcast,            2,  3, 5, required, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, int root, RawComm comm,           \
     Stream stream))                                                                                \
  X(ReduceScatter,        2,  3, 5, required, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, RedOp op, RawComm comm,           \
     Stream stream))                                                                                \
  X(AllGather,            2,  3, 5, required, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, RawComm comm, Stream stream))     \
  X(CommAbort,            2,  4, 2, optional, Result, (RawComm comm))                               \
  X(CommGetAsyncError,    2,  4, 2, optional, Result, (RawComm comm, Result* state))                \
  X(Send,                 2,  7, 3, optional, Result,                                               \
    (const void* in, std::size_t count, DataType type, int peer, RawComm comm, Stream stream))      \
  X(Recv,                 2,  7, 3, optional, Result,                                               \
    (void* out, std::size_t count, DataType type, int peer, RawComm comm, Stream stream))           \
  X(RedOpCreatePreMulSum, 2, 11, 4, optional, Result,                                               \
    (RedOp* op, void* scalar, DataType type, ScalarResidence residence, RawComm comm))              \
  X(RedOpDestroy,         2, 11, 4, optional, Result, (RedOp op, RawComm comm))                     \
  X(GetLastError,         2, 13, 4, optional, const char*, (RawComm comm))                          \
  X(CommInitRankConfig,   2, 14, 3, optional, Result,                                               \
    (RawComm* comm, int size, UniqueId id, int rank, ConfigRecord* config))                         \
  X(CommFinalize,         2, 14, 3, optional, Result, (RawComm comm))                               \
  X(CommSplit,            2, 18, 1, optional, Result,                                               \
    (RawComm comm, int color, int key, RawComm* made, ConfigRecord* config))                        \
  X(MemAlloc,             2, 19, 1, optional, Result, (void** pointer, std::size_t bytes))          \
  X(MemFree,              2, 19, 1, optional, Result, (void* pointer))                              \
  X(CommRegister,         2, 19, 1, optional, Result,                                               \
    (RawComm comm, void* pointer, std::size_t bytes, void** handle))                                \
  X(CommDeregister,       2, 19, 1, optional, Result, (RawComm comm, void* handle))                 \
  X(GroupSimulateEnd,     2, 22, 3, optional, Result, (SimulationRecord* record))                   \
  X(CommInitRankScalable, 2, 23, 4, optional, Result,                                               \
    (RawComm* comm, int size, int rank, int ids, UniqueId* id, ConfigRecord* config))               \
  X(CommShrink,           2, 27, 3, optional, Result,                                               \
    (RawComm comm, int* excluded, int count, RawComm* made, ConfigRecord* config, int flags))       \
  X(CommWindowRegister,   2, 27, 3, optional, Result,                                               \
    (RawComm comm, void* pointer, std::size_t bytes, RawWindow* window, int flags))                 \
  X(CommWindowDeregister, 2, 27, 3, optional, Result, (RawComm comm, RawWindow window))             \
  X(AlltoAll,             2, 28, 3, optional, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, RawComm comm, Stream stream))     \
  X(Gather,               2, 28, 3, optional, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, int root, RawComm comm,           \
     Stream stream))                                                                                \
  X(Scatter,              2, 28, 3, optional, Result,                                               \
    (const void* in, void* out, std::size_t count, DataType type, int root, RawComm comm,           \
     Stream stream))                                                                                \
  X(CommRevoke,           2, 28, 7, optional, Result, (RawComm comm, int flags))                    \
  X(CommGetUniqueId,      2, 29, 2, optional, Result, (RawComm comm, UniqueId* id))                 \
  X(CommGrow,             2, 29, 2, optional, Result,                                               \
    (RawComm comm, int size, const UniqueId* id, int rank, RawComm* made, ConfigRecord* config))    \
  X(PutSignal,            2, 29, 2, optional, Result,                                               \
    (const void* in, std::size_t count, DataType type, int peer, RawWindow window,                  \
     std::size_t offset, int signal, int context, unsigned flags, RawComm comm, Stream stream))     \
  X(Signal,               2, 29, 2, optional, Result,                                               \
    (int peer, int signal, int context, unsigned flags, RawComm comm, Stream stream))               \
  X(WaitSignal,           2, 29, 2, optional, Result,                                               \
    (int count, WaitSignalRecord* waits, RawComm comm, Stream stream))                              \
  X(CommSuspend,          2, 29, 7, optional, Result, (RawComm comm, int flags))                    \
  X(CommResume,           2, 29, 7, optional, Result, (RawComm comm))                               \
  X(CommMemStats,         2, 29, 7, optional, Result,                                               \
    (RawComm comm, MemoryStat stat, std::uint64_t* value))
// clang-format on

namespace pyparallel::nccl {

// One function pointer per line of the list; null where the library lacks the function.
struct Functions {
#define PYPARALLEL_NCCL_POINTER(name, major, minor, patch, presence, result, parameters) \
  result(*name) parameters = nullptr;
  PYPARALLEL_NCCL_SYMBOLS(PYPARALLEL_NCCL_POINTER)
#undef PYPARALLEL_NCCL_POINTER
};

}  // namespace pyparallel::nccl
