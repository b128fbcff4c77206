// Ranks that do not come, call something else, or are told to stop: everybody raises in time, says
// why, and harms nobody.
#include <chrono>

#include "arrays.h"
#include "base/error.h"
#include "cuda/loader.h"
#include "emulated_world.h"

namespace pyparallel::cuda::emulation {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr std::uint64_t kShort = 300'000'000;    // of waits that shall expire
constexpr std::uint64_t kLong = 60'000'000'000;  // of waits that shall end otherwise

struct Buffers {
  std::vector<float> in, out;
  explicit Buffers(std::size_t count, float value) : in(count, value), out(count, -1.0f) {}
  Request request(Op op, std::uint64_t timeout_ns, Grid grid = {2, 4}) {
    Request r;
    r.op = op;
    r.in = in.data();
    r.out = out.data();
    r.count = op == Op::all_gather || op == Op::reduce_scatter ? in.size() / 4 : in.size();
    r.grid = grid;
    r.timeout_ns = timeout_ns;
    return r;
  }
};

template <typename E>
std::string raised(const StatusPage& page) {
  try {
    raise_failure(page, "tp");
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    CHECK(false, "another class: ", e.what());
  }
  CHECK(false, "nothing was raised");
}

void contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    CHECK(text.find(part) != std::string::npos, "\"", part, "\" in \"", text, "\"");
  }
}

// Rank 1 of 3 comes too late, in call 3. The others record it and stop; what they had sent is still
// right; from then on they send nothing.
void a_late_rank_is_named_and_unharmed(Op op) {
  World world({3, 2, 2, 1024});
  std::vector<Buffers> buffers;
  for (int r = 0; r < 3; ++r) buffers.emplace_back(48, 1.0f + r);
  const auto call = [&](int r, std::uint64_t timeout) {
    world.call(r, buffers[r].request(op, timeout));
  };
  world.on_all_ranks([&](int r) {
    call(r, kLong);
    call(r, kLong);
  });
  const auto start = Clock::now();
  world.on_all_ranks([&](int r) {
    if (r != 1) call(r, kShort);
  });
  const double took = seconds_since(start);
  CHECK(took > 0.25 && took < 20, took);
  for (int r : {0, 2}) {
    const StatusPage& page = world.page(r);
    CHECK(page.state == StatusPage::timeout && page.peer == 1 && page.call == 3, page.peer);
    CHECK(page.op == static_cast<std::uint32_t>(op) && page.rank == static_cast<std::uint32_t>(r));
    CHECK(page.expected >> 32 == 3 && page.seen >> 32 == 2, page.expected, " ", page.seen);
    CHECK(page.waited_ns >= kShort && page.round == 0, page.waited_ns);
    contains(raised<Timeout>(page),
             {name_of(op), "#3", "group tp", "rank 1 absent after 0.", "last call is #2"});
  }
  // A one-round call of the late rank finds all it needs; a two-round one misses the second round.
  const bool one_round = op != Op::all_reduce_two_shot && op != Op::all_reduce_multimem;
  const std::string memory_before(world.memory(1), world.layout().bytes());
  call(1, kShort);
  CHECK((world.page(1).state == StatusPage::ok) == one_round, world.page(1).state);
  if (op == Op::all_reduce_one_shot) {
    for (float value : buffers[1].out) CHECK(value == 6.0f, value);
  }
  if (!one_round) {
    CHECK(world.page(1).round == 1, world.page(1).round);
    contains(raised<Timeout>(world.page(1)), {"absent", "round 1"});
  }
  // Failed ranks do nothing any more: no output, and not a byte of a peer's workspace.
  const std::string memory_after(world.memory(1), world.layout().bytes());
  std::vector<float> out_before = buffers[0].out;
  for (int r : {0, 2}) {
    for (float& value : buffers[r].in) value += 100.0f;  // what must not be sent
    call(r, kLong);
  }
  CHECK(memory_after == std::string(world.memory(1), world.layout().bytes()));
  CHECK(out_before == buffers[0].out);
  CHECK(world.page(0).call == 3, world.page(0).call);
}

// Everybody raises at once, long before the deadline, and each says what the other did.
void check_mismatch(const std::function<void(int, Request&)>& change,
                    std::initializer_list<const char*> words,
                    WorkspaceLayout odd_layout = {2, 3, 2, 1024}) {
  World world({2, 3, 2, 1024});
  std::vector<Buffers> buffers{Buffers(48, 1.0f), Buffers(48, 2.0f)};
  const auto start = Clock::now();
  world.on_all_ranks([&](int r) {
    Request request = buffers[r].request(Op::all_reduce_two_shot, kLong);
    change(r, request);
    // Rank 0's blocks are all waiting by then, also those that rank 1 does not have.
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Seat seat = world.seat(r);
    if (r == 1) seat.layout = odd_layout;
    for (const Recorded& launch : record(request, seat)) run(launch);
  });
  CHECK(seconds_since(start) < 30);
  for (int r = 0; r < 2; ++r) {
    const std::string text = raised<Mismatch>(world.page(r));
    contains(text, {r == 0 ? "rank 1 calls" : "rank 0 calls", "All ranks must make the same call"});
    contains(text, words);
  }
}

void another_grid_raises() {
  check_mismatch([](int r, Request& q) { q.grid.blocks = r == 0 ? 3 : 2; }, {"grid 3", "grid 2"});
}
void another_block_size_raises() {
  check_mismatch([](int r, Request& q) { q.grid.threads = 4 + r; }, {"sizes 0x"});
}
void another_size_raises() {
  check_mismatch([](int r, Request& q) { q.count -= r; }, {"sizes 0x"});
}
void another_op_raises() {
  check_mismatch(
      [](int r, Request& q) {
        if (r == 1) q.op = Op::all_reduce_one_shot;
      },
      {"one-shot", "two-shot"});
}
void another_dtype_raises() {
  check_mismatch(
      [](int r, Request& q) {
        if (r == 1) q.dtype = DType::bf16;
      },
      {"float32", "bfloat16"});
}
void a_barrier_against_a_collective_raises() {
  check_mismatch(
      [](int r, Request& q) {
        if (r == 1) q.op = Op::barrier;
      },
      {"barrier", "two-shot"});
}
// The tile that fits another layout: fewer flags, smaller slots (both within the memory there is).
void another_layout_raises() {
  check_mismatch([](int, Request&) {}, {"sizes 0x"}, {2, 2, 2, 512});
}

// The host ends a wait that would last a minute.
void abort_ends_a_wait() {
  World world({2, 2, 2, 256});
  Buffers buffers(32, 1.0f);
  const auto start = Clock::now();
  at_once({[&] { world.call(0, buffers.request(Op::all_reduce_one_shot, kLong)); },
           [&] {
             std::this_thread::sleep_for(std::chrono::milliseconds(100));
             request_abort(world.page(0));
           }});
  CHECK(seconds_since(start) < 20);
  contains(raised<Aborted>(world.page(0)), {"aborted by the host", "waiting for rank 1"});
}

void an_absent_signal_expires() {
  World world({2, 1, 2, 128});
  Request request;
  request.op = Op::wait_signal;
  request.index = 1;
  request.count = 3;
  request.timeout_ns = kShort;
  Request put = request;
  put.op = Op::put_signal;
  put.peer = 0;
  put.count = 2;
  world.call(1, put);
  world.call(0, request);
  contains(raised<Timeout>(world.page(0)), {"wait_signal", "counter 2, expected 3"});
}

// Two groups on one stream each, launched in opposite order: a deadlock by the caller. It ends: the
// wait that expires first is recorded, and its rank goes on to the call that the other one waits
// for.
void opposite_orders_end_by_deadline() {
  World first({2, 1, 2, 256}), second({2, 1, 2, 256});
  std::vector<Buffers> buffers{Buffers(32, 1.0f), Buffers(32, 2.0f)};
  first.on_all_ranks([&](int r) {
    const Request request = buffers[r].request(Op::all_reduce_one_shot, kShort, {1, 4});
    World& one = r == 0 ? first : second;
    World& other = r == 0 ? second : first;
    one.call(r, request);
    other.call(r, request);
  });
  const bool first_expired = first.page(0).state == StatusPage::timeout;
  if (first_expired) contains(raised<Timeout>(first.page(0)), {"rank 1 absent"});
  if (!first_expired) contains(raised<Timeout>(second.page(1)), {"rank 0 absent"});
}

}  // namespace

void add_fault_cases(Cases& cases) {
  cases["late_rank_one_shot"] = [] { a_late_rank_is_named_and_unharmed(Op::all_reduce_one_shot); };
  cases["late_rank_two_shot"] = [] { a_late_rank_is_named_and_unharmed(Op::all_reduce_two_shot); };
  cases["late_rank_multimem"] = [] { a_late_rank_is_named_and_unharmed(Op::all_reduce_multimem); };
  cases["late_rank_all_gather"] = [] { a_late_rank_is_named_and_unharmed(Op::all_gather); };
  cases["late_rank_reduce_scatter"] = [] { a_late_rank_is_named_and_unharmed(Op::reduce_scatter); };
  cases["another_grid_raises"] = another_grid_raises;
  cases["another_block_size_raises"] = another_block_size_raises;
  cases["another_size_raises"] = another_size_raises;
  cases["another_op_raises"] = another_op_raises;
  cases["another_dtype_raises"] = another_dtype_raises;
  cases["another_layout_raises"] = another_layout_raises;
  cases["a_barrier_against_a_collective_raises"] = a_barrier_against_a_collective_raises;
  cases["abort_ends_a_wait"] = abort_ends_a_wait;
  cases["an_absent_signal_expires"] = an_absent_signal_expires;
  cases["opposite_orders_end_by_deadline"] = opposite_orders_end_by_deadline;
}

}  // namespace pyparallel::cuda::emulation
