// Lets a host language end a wait: Python's Ctrl-C handler can only run when asked.
#pragma once

namespace pyparallel {

// Called from waits that have begun to sleep (never in a fast path), every 50 ms or so and after
// EINTR. Returns true when the wait should end; the wait then throws Interrupted.
using InterruptCheck = bool (*)();

void set_interrupt_check(InterruptCheck check) noexcept;
bool interrupt_requested();

// What the check keeps for whoever turns Interrupted into the language's own exception. One per
// thread and shared by all modules of that language: the check of one may serve the waits of
// another.
struct InterruptNote {
  void* pieces[3] = {};
};
InterruptNote& interrupt_note() noexcept;

}  // namespace pyparallel
