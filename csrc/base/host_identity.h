// Which ranks can share memory: those whose processes have equal host identities.
#pragma once

#include <string>

namespace pyparallel {

// "boot-<boot id>-net-<inode of the network name space>": processes of one running kernel that can
// reach each other's abstract sockets, which is what shm::Communicator::join needs. Two containers
// of one machine differ unless they share the network name space. PYPARALLEL_HOST_ID, when set, is
// taken as it is (printable, at most 128 characters). Throws SystemError, InvalidArgument.
std::string host_identity();

}  // namespace pyparallel
