// SPDX-License-Identifier: Apache-2.0
// What the parts of the stand-in for libascendcl share: every call of the runtime begins with Begin and ends
// with Finish, so that tests see all calls in order and can make any of them fail. A further part (streams,
// events) is a .cpp file of its own, linked into the same library.

#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

constexpr int kOk = 0;
constexpr int kInitializedBefore = 100002;
constexpr int kUninitialized = 100001;
constexpr int kBadParameter = 107000;
constexpr int kBadDevice = 107001;
constexpr int kNoContext = 107002;
constexpr int kNotSupported = 207000;
constexpr int kNoMemory = 207001;
constexpr int kRegistered = 507910;
constexpr int kNotRegistered = 507911;

enum class Needs { kNothing, kInit, kDevice };

// Return what a call must fail with before it does anything: a code that a test has planned, or that of a
// runtime that is not initialised, or of a thread without a device. kOk: go on.
int Begin(const char* call, Needs needs = Needs::kDevice);

// Record a call with what it was given and its result, and return the result.
int Finish(const char* call, int code, const char* format, ...) __attribute__((format(printf, 3, 4)));

// The calling thread's device; -1: none.
int Device();

// A switch that tests set by name; `otherwise` where it was not set.
std::int64_t Switch(const char* name, std::int64_t otherwise);

// Note that a rule was broken which the real runtime does not check, and which ends badly there.
void Violation(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Give up what a part keeps; called by standin_reset for each part that asked for it.
void OnReset(void (*forget)());

}  // namespace standin
