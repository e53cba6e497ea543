// SPDX-License-Identifier: Apache-2.0
// The stand-in's host memory: pinned allocations, registrations by the documented rules, and aliases at other
// addresses than the host's.
//
// Switches: single_limit and total_limit (bytes that can be registered at once and in all), without_alias
// (flags with which registering succeeds and the alias is NULL), runtime_memory_only (1: as on Linux up
// to 5.10), adjoining (1: the aliases of adjoining memory adjoin), base_only (1: the alias of a
// registration's first byte only).

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "ascendcl.h"
#include "second_mapping.h"

using namespace standin;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kMapped = 0x2, kPinned = 0x10000000, kKnownFlags = 0x2 | 0x4 | 0x8 | 0x10000000;
constexpr std::uint64_t kSkew = 64;  // all the alignment that is documented of aclrtMallocHost

struct Registration {
  std::uint64_t length;
  std::uint32_t flags;
  int device;
  SecondMapping alias;
};

struct Memory {
  std::mutex lock;
  std::map<std::uint64_t, Registration> registered;  // by host address
  std::map<std::uint64_t, std::uint64_t> allocated;  // by the address that was returned
};

Memory& Global() {
  static Memory& memory = *[] {
    OnReset([] {
      std::lock_guard guard(Global().lock);
      for (auto& [host, each] : Global().registered) Unmap(each.alias);
      Global().registered.clear();
    });
    return new Memory;
  }();
  return memory;
}

std::uint64_t Address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The registration that a byte lies in; end() if there is none.
auto Find(std::uint64_t at) {
  auto& registered = Global().registered;
  auto after = registered.upper_bound(at);
  if (after == registered.begin()) return registered.end();
  auto found = std::prev(after);
  return at < found->first + found->second.length ? found : registered.end();
}

bool Overlaps(std::uint64_t at, std::uint64_t length) {
  auto& registered = Global().registered;
  auto next = registered.lower_bound(at);
  return Find(at) != registered.end() || (next != registered.end() && next->first < at + length);
}

bool OfRuntime(std::uint64_t at, std::uint64_t length) {
  auto after = Global().allocated.upper_bound(at);
  if (after == Global().allocated.begin()) return false;
  auto found = std::prev(after);
  return at + length <= found->first + found->second;
}

[[maybe_unused]] int Register(std::uint64_t at, std::uint64_t length, std::uint32_t flags) {
  if (at == 0 || length == 0 || at % kPage || flags == 0 || (flags & ~kKnownFlags)) return kBadParameter;
  if (!IsMapped(at, length)) return kBadParameter;
  bool ours = OfRuntime(at, length);
  if (ours && (flags & kPinned)) return kBadParameter;
  if (!ours && Switch("runtime_memory_only", 0)) return kNotSupported;
  if (length > static_cast<std::uint64_t>(Switch("single_limit", std::int64_t{200} << 30))) return kNoMemory;
  std::uint64_t total = length;
  for (const auto& [host, each] : Global().registered) total += each.length;
  if (total > static_cast<std::uint64_t>(Switch("total_limit", std::int64_t{1} << 50))) return kNoMemory;
  if (Overlaps(at, length)) return kRegistered;
  Global().registered[at] = {length, flags, Device(), MapAgain(at, length, Switch("adjoining", 0))};
  return kOk;
}

// What a kernel is given for a byte; 0: nothing.
[[maybe_unused]] std::uint64_t AliasOf(std::uint64_t at) {
  auto found = Find(at);
  const auto& [host, each] = *found;
  bool null = !(each.flags & kMapped) || each.flags == Switch("without_alias", 0);
  return null ? 0 : each.alias.at + (at - host);
}

}  // namespace

extern "C" {

std::size_t standin_registrations() {
  std::lock_guard guard(Global().lock);
  return Global().registered.size();
}

// The host address behind an alias, where kernels that are simulated cannot use the alias itself; 0: no
// alias.
std::uint64_t standin_host_of(std::uint64_t alias) {
  std::lock_guard guard(Global().lock);
  for (const auto& [host, each] : Global().registered)
    if (alias - each.alias.at < each.length) return host + (alias - each.alias.at);
  return 0;
}

// Whether all of a registration's alias can be read and written, and shows the same memory.
int standin_is_real(std::uint64_t host) {
  std::lock_guard guard(Global().lock);
  auto found = Global().registered.find(host);
  return found != Global().registered.end() && found->second.alias.real;
}

#ifndef STANDIN_WITHOUT_V2
int aclrtHostRegisterV2(void* host, std::uint64_t length, std::uint32_t flags) {
  int code = Begin("aclrtHostRegisterV2");
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    code = Register(Address(host), length, flags);
  }
  return Finish("aclrtHostRegisterV2", code, "%p %llu %#x", host, static_cast<unsigned long long>(length),
                flags);
}

int aclrtHostGetDevicePointer(void* host, void** out, std::uint32_t flag) {
  int code = Begin("aclrtHostGetDevicePointer");
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    std::uint64_t at = Address(host);
    auto found = Find(at);
    bool known = found != Global().registered.end() && (found->first == at || !Switch("base_only", 0));
    if (flag != 0 || out == nullptr || !known) {
      code = kBadParameter;
    } else {
      *out = reinterpret_cast<void*>(AliasOf(at));
    }
  }
  return Finish("aclrtHostGetDevicePointer", code, "%p %u", host, flag);
}
#endif

#ifndef STANDIN_WITHOUT_ANY_REGISTER
int aclrtHostRegister(void* host, std::uint64_t length, int type, void** out) {
  int code = Begin("aclrtHostRegister");
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    code = type != 0 || out == nullptr ? kBadParameter : Register(Address(host), length, kMapped);
    if (code == kOk) *out = reinterpret_cast<void*>(AliasOf(Address(host)));
  }
  return Finish("aclrtHostRegister", code, "%p %llu %d", host, static_cast<unsigned long long>(length), type);
}
#endif

#ifndef STANDIN_WITHOUT_UNREGISTER
int aclrtHostUnregister(void* host) {
  int code = Begin("aclrtHostUnregister");
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    auto found = Global().registered.find(Address(host));
    if (found == Global().registered.end()) {
      code = kNotRegistered;
    } else {
      if (!IsMapped(found->first, found->second.length))
        Violation("%p was unmapped while it was registered", host);
      Unmap(found->second.alias);
      Global().registered.erase(found);
    }
  }
  return Finish("aclrtHostUnregister", code, "%p", host);
}
#endif

int aclrtMallocHost(void** out, std::size_t length) {
  int code = Begin("aclrtMallocHost");
  if (code == kOk && (length == 0 || out == nullptr)) code = kBadParameter;
  if (code == kOk && length > static_cast<std::uint64_t>(Switch("single_limit", std::int64_t{200} << 30))) {
    code = kNoMemory;
  }
  if (code == kOk) {
    std::uint64_t start = MapFresh(length + kSkew);
    std::lock_guard guard(Global().lock);
    Global().allocated[start + kSkew] = length;
    *out = reinterpret_cast<void*>(start + kSkew);
  }
  return Finish("aclrtMallocHost", code, "%zu", length);
}

int aclrtFreeHost(void* host) {
  int code = Begin("aclrtFreeHost");
  if (code == kOk) {
    std::lock_guard guard(Global().lock);
    auto found = Global().allocated.find(Address(host));
    if (found == Global().allocated.end()) {
      code = kBadParameter;
    } else {
      if (Overlaps(found->first, found->second)) Violation("%p was freed while it was registered", host);
      UnmapFresh(found->first - kSkew, found->second + kSkew);
      Global().allocated.erase(found);
    }
  }
  return Finish("aclrtFreeHost", code, "%p", host);
}

}  // extern "C"
