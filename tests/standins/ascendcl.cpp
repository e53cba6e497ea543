// SPDX-License-Identifier: Apache-2.0
// A stand-in for libascendcl's devices and for what is common to its parts: which calls were made, which are
// to fail, and each thread's device. Written from the published descriptions; no part of CANN is in it.

#include "ascendcl.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace standin {
namespace {

struct Planned {
  int after;  // calls that still succeed before it
  int code;
  int times;  // calls that fail
};

struct State {
  std::mutex lock;
  bool initialized = false;
  std::map<std::string, Planned> planned;
  std::map<std::string, std::int64_t> switches;
  std::vector<std::string> log;
  std::vector<std::string> violations;
  std::vector<void (*)()> forget;
};

State& Global() {
  static State state;
  return state;
}

thread_local int device = -1;
thread_local std::string account;  // of the thread's last failure

std::string Format(const char* format, std::va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

std::size_t Joined(const std::vector<std::string>& lines, char* out, std::size_t room) {
  std::string all;
  for (const auto& line : lines) all += line + "\n";
  if (all.size() < room) std::memcpy(out, all.c_str(), all.size() + 1);
  return all.size() + 1;
}

}  // namespace

int Begin(const char* call, Needs needs) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  auto found = state.planned.find(call);
  if (found != state.planned.end() && --found->second.after < 0) {
    int code = found->second.code;
    if (--found->second.times == 0) state.planned.erase(found);
    return code;
  }
  if (needs != Needs::kNothing && !state.initialized) return kUninitialized;
  if (needs == Needs::kDevice && device < 0) return kNoContext;
  return kOk;
}

int Finish(const char* call, int code, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string line = std::string(call) + " " + Format(format, arguments) + " -> " + std::to_string(code);
  va_end(arguments);
  if (code != kOk)
    account = "EZ9999: Inner Error!\n        " + line + "\n        TraceBack (most recent call last):";
  State& state = Global();
  std::lock_guard guard(state.lock);
  state.log.push_back(line);
  return code;
}

int Device() { return device; }

std::int64_t Switch(const char* name, std::int64_t otherwise) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  auto found = state.switches.find(name);
  return found == state.switches.end() ? otherwise : found->second;
}

void Violation(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string line = Format(format, arguments);
  va_end(arguments);
  State& state = Global();
  std::lock_guard guard(state.lock);
  state.violations.push_back(line);
}

void OnReset(void (*forget)()) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  state.forget.push_back(forget);
}

}  // namespace standin

using namespace standin;

extern "C" {

// --- for tests ---

// Forget everything: calls, plans, switches, registrations, the initialisation, this thread's device.
void standin_reset() {
  State& state = Global();
  for (auto forget : state.forget) forget();
  std::lock_guard guard(state.lock);
  state.initialized = false;
  state.planned.clear();
  state.switches.clear();
  state.log.clear();
  state.violations.clear();
  device = -1;
  account.clear();
}

// Let the nth call of a function from now on (1: the next), and so many from it on, fail with a code.
void standin_fail(const char* call, int nth, int times, int code) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  state.planned[call] = {nth - 1, code, times};
}

void standin_set(const char* name, std::int64_t value) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  state.switches[name] = value;
}

// All calls in order, one a line; returns the bytes that this takes, and writes them if there is room.
std::size_t standin_log(char* out, std::size_t room) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  return Joined(state.log, out, room);
}

std::size_t standin_violations(char* out, std::size_t room) {
  State& state = Global();
  std::lock_guard guard(state.lock);
  return Joined(state.violations, out, room);
}

// --- the runtime ---

int aclInit(const char*) {
  int code = Begin("aclInit", Needs::kNothing);
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    code = Global().initialized ? kInitializedBefore : kOk;
    Global().initialized = true;
  }
  return Finish("aclInit", code, "%s", "");
}

int aclFinalize() {
  int code = Begin("aclFinalize", Needs::kInit);
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    Global().initialized = false;
  }
  return Finish("aclFinalize", code, "%s", "");
}

int aclrtGetVersion(std::int32_t* major, std::int32_t* minor, std::int32_t* patch) {
  int code = Begin("aclrtGetVersion", Needs::kNothing);
  if (code == kOk) *major = 1, *minor = 17, *patch = 0;
  return Finish("aclrtGetVersion", code, "%s", "");
}

const char* aclrtGetSocName() { return "AscendStandIn"; }

const char* aclGetRecentErrMsg() { return account.empty() ? nullptr : account.c_str(); }

int aclrtGetDeviceCount(std::uint32_t* count) {
  int code = Begin("aclrtGetDeviceCount", Needs::kInit);
  if (code == kOk) *count = static_cast<std::uint32_t>(Switch("devices", 8));
  return Finish("aclrtGetDeviceCount", code, "%s", "");
}

int aclrtSetDevice(std::int32_t number) {
  int code = Begin("aclrtSetDevice", Needs::kInit);
  if (code == kOk && (number < 0 || number >= Switch("devices", 8))) code = kBadDevice;
  if (code == kOk) device = number;
  return Finish("aclrtSetDevice", code, "%d", number);
}

int aclrtGetDevice(std::int32_t* number) {
  int code = Begin("aclrtGetDevice");
  if (code == kOk) *number = device;
  return Finish("aclrtGetDevice", code, "%d", device);
}

int aclrtResetDevice(std::int32_t number) {
  int code = Begin("aclrtResetDevice", Needs::kInit);
  if (code == kOk && device == number) device = -1;
  return Finish("aclrtResetDevice", code, "%d", number);
}

}  // extern "C"
