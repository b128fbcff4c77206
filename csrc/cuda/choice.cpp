#include "cuda/choice.h"

#include <algorithm>

#include "base/error.h"

namespace pyparallel::cuda {

namespace {

constexpr int kThreads = 512;
constexpr std::uint64_t kPacksPerThread = 2;  // below that, another block only adds flags

double message_bytes(const Problem& p) { return static_cast<double>(p.count) * size_of(p.dtype); }

double launches(const Problem& p, Op op) {
  const std::uint64_t capacity = launch_capacity(op, p.dtype, p.layout);
  return static_cast<double>(std::max<std::uint64_t>(1, (p.count + capacity - 1) / capacity));
}

int meetings(Op op) {
  return op == Op::all_reduce_two_shot || op == Op::all_reduce_multimem ? 2 : 1;
}

double predict(const Problem& p, Op op) {
  const Link& l = p.link;
  return launches(p, op) * (l.launch_us + meetings(op) * l.meeting_us) +
         bytes_sent(p, op) / (l.bandwidth * l.efficiency) * 1e6;
}

double predict_nccl(const Problem& p) {
  const double world = p.layout.world;
  const double passes = p.collective == Collective::all_reduce ? 2 : 1;
  const double share =
      p.collective == Collective::all_reduce ? message_bytes(p) / world : message_bytes(p);
  return p.link.nccl_us +
         passes * (world - 1) *
             (p.link.nccl_step_us + share / (p.link.bandwidth * p.link.nccl_efficiency) * 1e6);
}

std::string exclusion(const Problem& p, Op op) {
  if (p.dtype != DType::f32 && p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return str("no kernel for ", name_of(p.dtype), " (float32, float16 and bfloat16 have one)");
  }
  if (std::string why = layout_misfit(p.layout); !why.empty()) return why;
  if (op != Op::all_reduce_multimem) return "";
  if (!p.multicast)
    return "no multicast address (sm_90 or later, NVSwitch and a multicast mapping are needed)";
  if (p.rank_order) return "the switch adds in an order of its own, and rank order was asked for";
  return "";
}

std::vector<Op> ops_of(Collective c) {
  switch (c) {
    case Collective::all_gather:
      return {Op::all_gather};
    case Collective::reduce_scatter:
      return {Op::reduce_scatter};
    default:
      return {Op::all_reduce_one_shot, Op::all_reduce_two_shot, Op::all_reduce_multimem};
  }
}

}  // namespace

double bytes_sent(const Problem& p, Op op) {
  const double world = p.layout.world, bytes = message_bytes(p);
  switch (op) {
    case Op::all_reduce_two_shot:
      return 2 * (world - 1) / world * bytes;
    case Op::all_reduce_multimem:
      // The switch fetches every rank's data once and takes each rank's chunk of sums once.
      return world > 1 ? bytes * (1 + 1 / world) : 0;
    default:
      return (world - 1) * bytes;
  }
}

Grid grid_for(const Problem& p, Op op) {
  const std::uint64_t launch = std::min(p.count, launch_capacity(op, p.dtype, p.layout));
  std::uint64_t packs = (launch * size_of(p.dtype) + 15) / 16;
  if (meetings(op) == 2) packs = (packs + p.layout.world - 1) / p.layout.world;
  const std::uint64_t per_block = kThreads * kPacksPerThread;
  const std::uint64_t blocks = (packs + per_block - 1) / per_block;
  return {static_cast<int>(std::clamp<std::uint64_t>(blocks, 1, p.layout.max_blocks)), kThreads};
}

std::vector<Candidate> candidates(const Problem& p) {
  std::vector<Candidate> all;
  for (Op op : ops_of(p.collective)) {
    Candidate c;
    c.op = op;
    c.excluded = exclusion(p, op);
    if (c.excluded.empty()) c.predicted_us = predict(p, op);
    all.push_back(c);
  }
  Candidate nccl;
  nccl.nccl = true;
  if (p.nccl) {
    nccl.predicted_us = predict_nccl(p);
  } else {
    nccl.excluded = "no NCCL communicator for this group";
  }
  all.push_back(nccl);
  return all;
}

Choice choose(const Problem& p) {
  Choice choice;
  choice.candidates = candidates(p);
  const Candidate* best = nullptr;
  std::string out;
  for (const Candidate& c : choice.candidates) {
    if (!c.excluded.empty()) {
      out += str(out.empty() ? "" : "; ", c.name(), ": ", c.excluded);
    } else if (best == nullptr || c.predicted_us < best->predicted_us) {
      best = &c;
    }
  }
  const std::string what =
      str(p.count, " ", name_of(p.dtype), " elements on ", p.layout.world, " ranks");
  if (best == nullptr) throw Unsupported(str("no algorithm for ", what, ": ", out));
  choice.candidate = *best;
  if (!best->nccl) choice.grid = grid_for(p, best->op);
  std::ostringstream reason;
  reason.precision(3);
  reason << best->name() << ": least predicted time for " << what << ", " << best->predicted_us
         << " us";
  for (const Candidate& c : choice.candidates) {
    if (&c != best && c.excluded.empty())
      reason << "; " << c.name() << " " << c.predicted_us << " us";
  }
  if (!out.empty()) reason << "; out: " << out;
  choice.reason = reason.str();
  return choice;
}

}  // namespace pyparallel::cuda
