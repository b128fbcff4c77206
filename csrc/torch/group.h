// From a seat in a process group to a communicator: shared memory where all ranks are on one host,
// else shared memory inside each host and gloo between them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "shm/communicator.h"
#include "torch/rendezvous.h"

namespace pyparallel::dist {

// Makes a gloo group (torch's own, through its Python interface; collective over `size` ranks).
using GlooFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout)>;

// Collective over the ranks of the seat's group. Throws Timeout naming the absent ranks.
std::shared_ptr<shm::Communicator> open_group(const Seat& seat, const GlooFactory& gloo);

}  // namespace pyparallel::dist
