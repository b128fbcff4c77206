// Puts and signals: the peer takes no part but by waiting.
#include "nccl/communicator.h"
#include "nccl/memory.h"

namespace pyparallel::nccl {

void Communicator::check_signal(int signal, int context, const char* what) const {
  PYPARALLEL_REQUIRE(signal >= 0 && context >= 0, where(), ": ", what, ": signal ", signal,
                     ", context ", context, "; neither is negative");
}

void Communicator::put_signal(const void* data, std::size_t count, Element e, int peer,
                              const Window& window, std::size_t offset, int signal, int context,
                              Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), PutSignal);
  check_rank(peer, "peer", "put_signal");
  check_signal(signal, context, "put_signal");
  e = movable(e);
  const std::size_t bytes = bytes_of(count, e);
  check_call(data, nullptr, bytes, 0, 0, "put_signal");
  PYPARALLEL_REQUIRE(window.belongs_to(*this) && window.open(), where(),
                     ": put_signal: the window is closed, or another communicator's");
  PYPARALLEL_REQUIRE(offset <= window.bytes() && bytes <= window.bytes() - offset, where(),
                     ": put_signal of ", bytes, " bytes at offset ", offset, " of a window of ",
                     window.bytes(), " bytes");
  submit(
      stream,
      str("ncclPutSignal(count ", count, ", ", e.name, ", peer ", peer, ", offset ", offset, ")"),
      [=, &l = library(), handle = window.handle()](RawComm comm) {
        return l->PutSignal(data, count * e.units, e.type, peer, handle, offset, signal, context, 0,
                            comm, stream);
      });
}

void Communicator::signal(int peer, int signal, int context, Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), Signal);
  check_rank(peer, "peer", "signal");
  check_signal(signal, context, "signal");
  submit(stream, str("ncclSignal(peer ", peer, ", signal ", signal, ")"),
         [=, &l = library()](RawComm comm) {
           return l->Signal(peer, signal, context, 0, comm, stream);
         });
}

void Communicator::wait_signals(const std::vector<WaitSignalRecord>& waits, Stream stream) {
  PYPARALLEL_NCCL_NEED(library(), WaitSignal);
  PYPARALLEL_REQUIRE(!waits.empty(), where(), ": wait_signals for nothing");
  std::string from;
  for (const WaitSignalRecord& wait : waits) {
    check_rank(wait.peer, "peer", "wait_signals");
    check_signal(wait.signal, wait.context, "wait_signals");
    PYPARALLEL_REQUIRE(wait.count > 0, where(), ": wait_signals: ", wait.count,
                       " signals from rank ", wait.peer, "; at least one");
    from += str(from.empty() ? "" : ", ", wait.count, " from ", wait.peer);
  }
  submit(stream, str("ncclWaitSignal(", from, ")"), [=, &l = library()](RawComm comm) {
    std::vector<WaitSignalRecord> own = waits;
    return l->WaitSignal(static_cast<int>(own.size()), own.data(), comm, stream);
  });
}

}  // namespace pyparallel::nccl
