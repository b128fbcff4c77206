// How calls end when they cannot succeed: on every rank, by the promised error. Included by
// test_communicator.cpp.
#pragma once

namespace {

// Every rank but `culprit` gets `expected` from a barrier, with `word` in its message, and again
// from the next call; `cause` is what the culprit does.
template <typename Cause>
void fails(const char* what, int n, Status expected, const char* word, const Cause& cause,
           std::chrono::milliseconds timeout = kTimeout) {
  const int culprit = n - 1;
  run(what, n, [&](std::shared_ptr<Communicator> comm) {
    comm->barrier(soon());
    if (comm->rank() == culprit) return cause(*comm);
    std::string text;
    const auto call = [&] { comm->barrier(Deadline::after(timeout)); };
    Status got = status_of(call, &text);
    check::that(got == expected && text.find(word) != std::string::npos, what, " on rank ",
                comm->rank(), ": status ", static_cast<int>(got), ", ", text);
    got = status_of(call);
    check::that(got == expected, what, ": the next call has status ", static_cast<int>(got));
    check::that(!comm->failure().empty(), what, ": failure() is empty");
  });
}

void failures(int n) {
  using std::chrono::milliseconds;
  fails("abort", n, Status::aborted, "because of a test", [](Communicator& comm) {
    std::this_thread::sleep_for(milliseconds(30));
    comm.abort("because of a test");
  });
  fails("close", n, Status::peer_lost, "left the group", [](Communicator& comm) {
    std::this_thread::sleep_for(milliseconds(30));
    comm.close();
    check::that(status_of([&] { comm.barrier(soon()); }) == Status::closed, "use after close");
  });
  fails(
      "absent", n, Status::timeout, str("rank ", n - 1, " (pid ").c_str(),
      [&](Communicator& comm) {
        // Stays until all others have given up.
        std::string text;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (comm.failure().empty() && std::chrono::steady_clock::now() < end)
          std::this_thread::sleep_for(milliseconds(5));
        check::that(status_of([&] { comm.barrier(soon()); }, &text) == Status::timeout,
                    "the absent rank's own next call: ", text);
      },
      milliseconds(150));

  // A misfit raises on every rank and leaves the group usable; so does a refused argument.
  run("misfit", n, [&](std::shared_ptr<Communicator> comm) {
    const int me = comm->rank();
    std::vector<float> x(100, 1.0f);
    for (int round = 0; round < 3; ++round) {
      std::string text;
      Status got = status_of(
          [&] { comm->all_reduce(x.data(), x.data(), me == 0 ? 99 : 100, DType::f32, {}, soon()); },
          &text);
      check::that(
          got == Status::mismatch && text.find("99 on rank 0; 100 on rank") != std::string::npos,
          text);
      got = status_of(
          [&] {
            if (me == 0) {
              comm->barrier(soon());
            } else {
              comm->broadcast(x.data(), 100, DType::f32, 0, soon());
            }
          },
          &text);
      check::that(got == Status::mismatch &&
                      text.find("barrier on rank 0; broadcast on rank") != std::string::npos,
                  text);
      got = status_of([&] { comm->broadcast(x.data(), 100, DType::f32, me == 0 ? n : 0, soon()); },
                      &text);
      check::that(got == (me == 0 ? Status::invalid_argument : Status::mismatch), text);
      OneCall(*comm, {seed + 9, static_cast<std::uint64_t>(round), 200000}).make();
    }
  });

  // Who leaves after its last message takes nothing from a receive of anybody's; when all have
  // left, it ends.
  run("leaving", n, [&](std::shared_ptr<Communicator> comm) {
    int value = comm->rank();
    if (comm->rank() != 0) {
      std::this_thread::sleep_for(milliseconds(40 * (comm->rank() - 1)));
      return comm->send(&value, 1, DType::i32, 0, 4, soon());
    }
    for (int r = 1; r < n; ++r) {
      const int from = comm->recv(&value, 1, DType::i32, Communicator::any_source, 4, soon());
      check::that(value == from, "from ", from, ": ", value);
    }
    std::string text;
    const Status got = status_of(
        [&] { comm->recv(&value, 1, DType::i32, Communicator::any_source, 4, soon()); }, &text);
    check::that(got == Status::peer_lost && text.find("left the group") != std::string::npos, text);
  });

  // Messages: a wrong size is an error of the receive alone; an abort ends a waiting receive.
  std::atomic<int> receiving{0};
  run("message failures", n, [&](std::shared_ptr<Communicator> comm) {
    int value = comm->rank();
    if (comm->rank() == 0) {
      for (int r = 1; r < n; ++r) comm->send(&value, 1, DType::i32, r, 1, soon());
      while (receiving.load(std::memory_order_relaxed) < n - 1)
        std::this_thread::sleep_for(milliseconds(5));
      std::this_thread::sleep_for(milliseconds(20));
      return comm->abort("no more messages");
    }
    std::int64_t wide = 7;
    std::string text;
    Status got = status_of([&] { comm->recv(&wide, 1, DType::i64, 0, 1, soon()); }, &text);
    check::that(got == Status::mismatch && wide == 7, "a message of another type: ", text);
    auto pending = comm->irecv(&wide, 1, DType::i64, Communicator::any_source, 2);
    receiving.fetch_add(1, std::memory_order_relaxed);
    got = status_of([&] { comm->recv(&value, 1, DType::i32, 0, 2, soon()); }, &text);
    check::that(got == Status::aborted && text.find("no more messages") != std::string::npos, text);
    got = status_of([&] { pending->wait(soon()); });
    check::that(got == Status::aborted && wide == 7,
                "a receive in flight: ", static_cast<int>(got));
  });
}

}  // namespace
