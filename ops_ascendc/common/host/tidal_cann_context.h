// SPDX-License-Identifier: Apache-2.0
// Between CANN's tiling context and the host tiling of this folder, which knows no header of CANN: the
// arguments and the platform on the way in, the launch on the way out. Only the operators' _tiling.cpp files
// include it.

#pragma once

#include <cstdio>
#include <cstring>
#include <string>

#include "register/op_def_registry.h"
#include "tidal_arguments.h"
#include "tiling/platform/platform_ascendc.h"

namespace tidal {
namespace host {

constexpr uint32_t kBatchSchedule =
    1;  // all cores of a launch start together; without it SyncAll may wait for ever

inline Element ElementOf(ge::DataType type) {
  switch (type) {
    case ge::DT_FLOAT16:
      return Element::kHalf;
    case ge::DT_BF16:
      return Element::kBfloat16;
    case ge::DT_INT8:
      return Element::kInt8;
    case ge::DT_INT32:
      return Element::kInt32;
    default:
      return Element::kOther;
  }
}

inline std::vector<int64_t> DimsOf(const gert::StorageShape* shape) {
  std::vector<int64_t> dims;
  if (shape == nullptr) return dims;
  const gert::Shape& storage = shape->GetStorageShape();
  for (size_t i = 0; i < storage.GetDimNum(); ++i) dims.push_back(storage.GetDim(i));
  return dims;
}

inline Argument InputOf(gert::TilingContext& context, size_t index, const char* name) {
  const auto* desc = context.GetInputDesc(index);
  return {name, desc == nullptr ? Element::kOther : ElementOf(desc->GetDataType()),
          DimsOf(context.GetInputShape(index))};
}

inline Argument OutputOf(gert::TilingContext& context, size_t index, const char* name) {
  const auto* desc = context.GetOutputDesc(index);
  return {name, desc == nullptr ? Element::kOther : ElementOf(desc->GetDataType()),
          DimsOf(context.GetOutputShape(index))};
}

inline Platform PlatformOf(gert::TilingContext& context) {
  const platform_ascendc::PlatformAscendC platform(context.GetPlatformInfo());
  uint64_t ub_bytes = 0;
  platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, ub_bytes);
  return {static_cast<int64_t>(platform.GetCoreNumAiv()), static_cast<int64_t>(ub_bytes),
          static_cast<int64_t>(platform.GetLibApiWorkSpaceSize())};
}

inline ge::graphStatus Refuse(const char* op, const std::string& error) {
  std::fprintf(stderr, "%s: %s\n", op, error.c_str());
  return ge::GRAPH_FAILED;
}

template <typename Tiling>
ge::graphStatus Start(gert::TilingContext& context, const char* op, const Launch<Tiling>& launch) {
  auto* raw = context.GetRawTilingData();
  if (raw == nullptr || raw->GetCapacity() < sizeof(Tiling)) return Refuse(op, "no room for the tiling data");
  std::memcpy(raw->GetData(), &launch.tiling, sizeof(Tiling));
  raw->SetDataSize(sizeof(Tiling));
  size_t* workspaces = context.GetWorkspaceSizes(1);
  if (workspaces == nullptr) return Refuse(op, "no workspace can be asked for");
  workspaces[0] = static_cast<size_t>(launch.workspace);
  context.SetBlockDim(static_cast<uint32_t>(launch.cores));
  context.SetTilingKey(launch.key);
  return ge::GRAPH_SUCCESS;
}

}  // namespace host
}  // namespace tidal
