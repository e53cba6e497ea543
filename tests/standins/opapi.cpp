// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcust_opapi, the operator package as CANN builds it: the two-phase functions of both
// operators, with the checks that the documentation promises, over the kernels in simulation. The first phase
// makes an executor that serves one launch; the second runs the kernel at once and notes the stream.

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "nnopbase.h"
#include "tidal_kernels.h"

struct aclOpExecutor {
  const char* name;
  std::array<TidalTensor, TIDAL_MOST_TENSORS> tensors;
  int64_t block;
};

namespace {

constexpr int kNull = 161001;
constexpr int kInvalid = 161002;
constexpr int kTiling = 561002;
constexpr int kRuntime = 361001;
constexpr uint64_t kWorkspace = 1 << 20;  // more than any kernel here asks for

thread_local std::string message;
std::map<std::string, int> planned;
std::vector<std::string> calls;
int64_t executors = 0;

int Finish(const std::string& call, int code, const std::string& about = "") {
  calls.push_back(call + " -> " + std::to_string(code));
  if (code != 0) message = call + ": " + about;
  return code;
}

bool Planned(const char* call, int& code) {
  const auto found = planned.find(call);
  if (found == planned.end()) return false;
  code = found->second;
  planned.erase(found);
  return true;
}

int ElementOf(int dtype) {
  switch (dtype) {
    case kFloat16:
      return TIDAL_FLOAT16;
    case kBfloat16:
      return TIDAL_BFLOAT16;
    case kInt8:
      return TIDAL_INT8;
    case kInt32:
      return TIDAL_INT32;
    default:
      return TIDAL_OTHER;
  }
}

// The first phase of an operator over so many tensors.
int Prepare(const char* name, const std::vector<const aclTensor*>& tensors, int64_t block, uint64_t* size,
            aclOpExecutor** executor) {
  const std::string call = std::string(name) + "GetWorkspaceSize";
  int code = 0;
  if (Planned(call.c_str(), code)) return Finish(call, code, "planned by a test");
  if (size == nullptr || executor == nullptr) return Finish(call, kNull, "no place for the results");
  auto made = new aclOpExecutor{name, {}, block};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const aclTensor* tensor = tensors[i];
    const bool bad = tensor == nullptr || tensor->dims.size() > 4;
    if (bad || ElementOf(tensor->dtype) == TIDAL_OTHER) {
      delete made;
      const std::string which = "argument " + std::to_string(i);
      if (tensor == nullptr) return Finish(call, kNull, which + " is null");
      return Finish(call, kInvalid, which + ": dtype or rank is not one of those supported");
    }
    TidalTensor& kept = made->tensors[i];
    kept.data = tensor->data;
    kept.element = ElementOf(tensor->dtype);
    kept.rank = static_cast<int32_t>(tensor->dims.size());
    std::copy(tensor->dims.begin(), tensor->dims.end(), kept.dims);
  }
  ++executors;
  *size = kWorkspace;
  *executor = made;
  return Finish(call, 0);
}

// The second phase; `run` gets the executor's tensors.
template <typename Run>
int Start(const char* name, void* workspace, uint64_t size, aclOpExecutor* executor, void* stream,
          const Run& run) {
  int code = 0;
  if (Planned(name, code)) {
    delete executor;
    --executors;
    return Finish(name, code, "planned by a test");
  }
  if (executor == nullptr || workspace == nullptr) return Finish(name, kNull, "no executor or no workspace");
  if (std::strcmp(executor->name, name) != 0 || size != kWorkspace) {
    return Finish(name, kInvalid, "executor or workspace are another call's");
  }
  std::memset(workspace, 0x5A, size);  // a size that was not really there shows at once
  const TidalMachine machine{4, 0, 1, 1, 7};
  TidalReport report;
  const int outcome = run(*executor, machine, report);
  delete executor;
  --executors;
  char text[64];
  std::snprintf(text, sizeof(text), "%s on stream %p", name, stream);
  if (outcome == TIDAL_REFUSED_BY_HOST) return Finish(text, kTiling, report.error);
  return Finish(text, outcome == TIDAL_DONE ? 0 : kRuntime, report.error);
}

}  // namespace

extern "C" {

int aclnnGatherSelectionKvCacheGetWorkspaceSize(
    aclTensor* selection_k_rope, aclTensor* selection_kv_cache, aclTensor* selection_kv_block_table,
    aclTensor* selection_kv_block_status, const aclTensor* selection_topk_indices,
    const aclTensor* full_k_rope, const aclTensor* full_kv_cache, const aclTensor* full_kv_block_table,
    const aclTensor* full_kv_actual_seq, const aclTensor* full_q_actual_seq,
    int64_t selection_topk_block_size, const aclTensor* selection_kv_actual_seq, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  return Prepare("aclnnGatherSelectionKvCache",
                 {selection_k_rope, selection_kv_cache, selection_kv_block_table, selection_kv_block_status,
                  selection_topk_indices, full_k_rope, full_kv_cache, full_kv_block_table, full_kv_actual_seq,
                  full_q_actual_seq, selection_kv_actual_seq},
                 selection_topk_block_size, workspace_size, executor);
}

int aclnnGatherSelectionKvCache(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
  return Start("aclnnGatherSelectionKvCache", workspace, size, executor, stream,
               [](aclOpExecutor& call, const TidalMachine& machine, TidalReport& report) {
                 return tidal_gather_selection_kv_cache(call.tensors.data(), call.block, &machine, &report);
               });
}

int aclnnGatherMissRowsGetWorkspaceSize(aclTensor* selection_k_rope, aclTensor* selection_kv_cache,
                                        const aclTensor* full_k_rope, const aclTensor* full_kv_cache,
                                        const aclTensor* miss_rows, const aclTensor* miss_slots,
                                        const aclTensor* miss_count, uint64_t* workspace_size,
                                        aclOpExecutor** executor) {
  return Prepare(
      "aclnnGatherMissRows",
      {selection_k_rope, selection_kv_cache, full_k_rope, full_kv_cache, miss_rows, miss_slots, miss_count},
      0, workspace_size, executor);
}

int aclnnGatherMissRows(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
  return Start("aclnnGatherMissRows", workspace, size, executor, stream,
               [](aclOpExecutor& call, const TidalMachine& machine, TidalReport& report) {
                 return tidal_gather_miss_rows(call.tensors.data(), &machine, &report);
               });
}

// The text of this thread's last error, as aclGetRecentErrMsg gives it.
const char* standin_opapi_message() { return message.c_str(); }

// Let the next call of a function fail.
void standin_opapi_fail(const char* call, int code) { planned[call] = code; }

// Executors that were made and not used.
int64_t standin_opapi_executors() { return executors; }

// The calls so far, one a line; forgets them.
const char* standin_opapi_calls() {
  static std::string text;
  text.clear();
  for (const std::string& call : calls) text += call + "\n";
  calls.clear();
  return text.c_str();
}

}  // extern "C"
