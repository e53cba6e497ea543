// SPDX-License-Identifier: Apache-2.0
// How the simulation refuses: a Fault carries one line that names the core, the API, the buffer and the
// offset.

#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace tidal_sim {

// What a kernel did that a device would answer with wrong data, a trap or a hang.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Unwinds a core of a launch that has failed elsewhere; it is never reported. No std::exception, so that a
// kernel's own handlers do not stop it.
struct Stopped {};

// Who asks: for the head of the message.
struct Caller {
  int core;
  const char* api;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void refuse(const Caller& who, const Parts&... parts) {
  throw Fault(text("core ", who.core, ": ", who.api, ": ", parts...));
}

}  // namespace tidal_sim
