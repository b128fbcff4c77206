#include "base/error.h"

#include <cstring>

namespace pyparallel {

void throw_status(Status status, const std::string& what) {
  switch (status) {
    case Status::invalid_argument:
      throw InvalidArgument(what);
    case Status::mismatch:
      throw Mismatch(what);
    case Status::timeout:
      throw Timeout(what);
    case Status::peer_lost:
      throw PeerLost(what);
    case Status::aborted:
      throw Aborted(what);
    case Status::closed:
      throw Closed(what);
    case Status::no_memory:
      throw NoMemory(what);
    case Status::system:
      throw SystemError(what);
    case Status::nccl:
      throw NcclError(what);
    case Status::cuda:
      throw CudaError(what);
    case Status::unsupported:
      throw Unsupported(what);
    case Status::interrupted:
      throw Interrupted(what);
    default:
      throw Error(status, what);
  }
}

std::string errno_text(const std::string& call, int error_number) {
  char buffer[128];
  // The GNU form of strerror_r: returns the text, which may or may not be in the buffer.
  return str(call, ": ", strerror_r(error_number, buffer, sizeof buffer), " (errno ", error_number,
             ")");
}

}  // namespace pyparallel
