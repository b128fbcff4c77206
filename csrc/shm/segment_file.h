// The memory file behind a Segment.
#pragma once

#include <cstddef>
#include <string>

#include "base/unique_fd.h"
#include "shm/bootstrap.h"

namespace pyparallel::shm {

// Anonymous (memfd), or nameless in PYPARALLEL_SHM_DIR where that is set. Nothing is reserved yet.
UniqueFd make_memory_file(std::size_t bytes);

// Reserves pages, so that touching them later cannot fail. Throws NoMemory with needed and free
// bytes.
void reserve_in_file(int fd, std::size_t offset, std::size_t bytes, const std::string& name);

}  // namespace pyparallel::shm
