// Several calls launched as one. Inside a group every call is checked and queued; the outermost
// run() hands them all to NCCL between GroupStart and GroupEnd. A group that is left without run()
// (an exception) launches nothing: neither half of an exchange, nor a state that later calls trip
// on. Groups belong to the thread that opened them and nest; an inner run() adds to the outer
// group.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nccl/abi.h"

namespace pyparallel::nccl {

class Communicator;

// One queued call of the library.
struct Operation {
  std::shared_ptr<Communicator> communicator;
  Stream stream = nullptr;
  std::function<Result(RawComm)> call;  // owns what it needs (a PreMulSum)
  std::string text;                     // "ncclAllReduce(count 8, float32, sum)"
};

class Group {
 public:
  Group();
  ~Group();  // without run(): forgets what was queued since the constructor
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Launches (outermost) or leaves to the outer group. Throws for the first call that failed.
  void run();
  // Instead of run(), of an outermost group: launches nothing and gives the library's estimate of
  // how long it would take, in microseconds.
  float simulate();

  static bool active() noexcept;  // whether this thread is inside a group
  // Queues inside a group, else launches at once.
  static void submit(Operation operation);

 private:
  std::size_t mark_ = 0;
  bool open_ = true;
};

}  // namespace pyparallel::nccl
