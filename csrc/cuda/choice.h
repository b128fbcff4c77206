// Which algorithm for which message. Pure functions of what all ranks share (never of a clock, an
// address or free memory): two ranks must not choose differently.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/calls.h"

namespace pyparallel::cuda {

enum class Collective : std::uint8_t { all_reduce, all_gather, reduce_scatter };

// What the prediction knows of the machine. The defaults are published figures of an H100 with
// NVLink 4 and plausible latencies; bench/gpu measures them.
struct Link {
  double bandwidth = 450e9;   // bytes per second, one direction, per GPU
  double launch_us = 2.5;     // start and end of a kernel
  double meeting_us = 2.0;    // flags there and seen, one way over the link included
  double efficiency = 0.75;   // share of the bandwidth our pushes reach
  double nccl_us = 14.0;      // NCCL's floor
  double nccl_step_us = 1.0;  // and what each ring step adds
  double nccl_efficiency = 0.85;
};

struct Problem {
  Collective collective = Collective::all_reduce;
  DType dtype = DType::f32;
  std::uint64_t count = 0;  // as in Request
  WorkspaceLayout layout;
  bool multicast = false;  // all ranks have a multicast address
  bool rank_order = true;  // the sum must be that of rank order, the same from run to run
  bool nccl = true;        // NCCL may be chosen
  Link link;
};

struct Candidate {
  bool nccl = false;  // else: `op`
  Op op = Op::barrier;
  double predicted_us = 0;
  std::string excluded;  // why it is out of the question; empty otherwise
  std::string name() const { return nccl ? "nccl" : name_of(op); }
};

struct Choice {
  Candidate candidate;
  Grid grid;
  std::string reason;                 // one sentence
  std::vector<Candidate> candidates;  // all that were looked at, the chosen one included
};

// Every algorithm for the problem, with its predicted time or the reason why not.
std::vector<Candidate> candidates(const Problem& problem);
// The fastest by prediction. Throws Unsupported with every reason when there is none.
Choice choose(const Problem& problem);
// As many blocks as the message has work for.
Grid grid_for(const Problem& problem, Op op);
// Bytes a rank sends over its link (own share not counted).
double bytes_sent(const Problem& problem, Op op);

}  // namespace pyparallel::cuda
