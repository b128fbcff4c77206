// Fork detection: a forked child shares our memory mappings but is no rank. Every object that owns
// shared state remembers the generation it was made in and refuses work when it has changed.
#pragma once

#include <cstdint>

namespace pyparallel {

// 0 in the process that loaded the library, one more in each forked child (pthread_atfork). One
// load.
std::uint32_t fork_generation() noexcept;

}  // namespace pyparallel
