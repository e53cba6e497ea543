// SPDX-License-Identifier: Apache-2.0
// As much of CANN's host interface as our operators use, by its documented names, so that their host sources
// are compiled and called in a test. Nothing here is CANN's text; what it does not have, our sources must not
// use.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ge {

enum DataType { DT_FLOAT16, DT_BF16, DT_INT8, DT_INT32, DT_FLOAT };
enum Format { FORMAT_ND };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
constexpr graphStatus GRAPH_FAILED = 1;

}  // namespace ge

namespace gert {

class Shape {
 public:
  std::vector<int64_t> dims;
  size_t GetDimNum() const { return dims.size(); }
  int64_t GetDim(size_t i) const { return dims[i]; }
  void SetDimNum(size_t count) { dims.resize(count); }
  void SetDim(size_t i, int64_t dim) { dims[i] = dim; }
};

class StorageShape {
 public:
  Shape shape;
  const Shape& GetStorageShape() const { return shape; }
};

class CompileTimeTensorDesc {
 public:
  ge::DataType type;
  ge::DataType GetDataType() const { return type; }
};

class RuntimeAttrs {
 public:
  int64_t first;
  template <typename T>
  const T* GetAttrPointer(size_t i) const {
    return i == 0 ? &first : nullptr;
  }
};

class TilingData {
 public:
  std::vector<uint8_t> bytes;
  size_t used = 0;
  void* GetData() { return bytes.data(); }
  size_t GetCapacity() const { return bytes.size(); }
  void SetDataSize(size_t size) { used = size; }
};

struct PlatformInfo {
  uint32_t cores;
  uint64_t ub_bytes;
  uint32_t system_workspace;
};

class TilingContext {
 public:
  std::vector<StorageShape> input_shapes, output_shapes;
  std::vector<CompileTimeTensorDesc> input_descs, output_descs;
  RuntimeAttrs attrs;
  PlatformInfo platform;
  TilingData tiling;
  size_t workspaces[1] = {};
  uint64_t key = 0;
  uint32_t blocks = 0;
  uint32_t schedule = 0;

  const StorageShape* GetInputShape(size_t i) const { return &input_shapes[i]; }
  const StorageShape* GetOutputShape(size_t i) const { return &output_shapes[i]; }
  const CompileTimeTensorDesc* GetInputDesc(size_t i) const { return &input_descs[i]; }
  const CompileTimeTensorDesc* GetOutputDesc(size_t i) const { return &output_descs[i]; }
  const RuntimeAttrs* GetAttrs() const { return &attrs; }
  const PlatformInfo* GetPlatformInfo() const { return &platform; }
  TilingData* GetRawTilingData() { return &tiling; }
  size_t* GetWorkspaceSizes(size_t) { return workspaces; }
  ge::graphStatus SetBlockDim(uint32_t count) { return blocks = count, ge::GRAPH_SUCCESS; }
  ge::graphStatus SetTilingKey(uint64_t value) { return key = value, ge::GRAPH_SUCCESS; }
  ge::graphStatus SetScheduleMode(uint32_t mode) { return schedule = mode, ge::GRAPH_SUCCESS; }
};

class TilingParseContext {};

class InferShapeContext {
 public:
  std::vector<Shape> inputs, outputs;
  const Shape* GetInputShape(size_t i) const { return &inputs[i]; }
  Shape* GetOutputShape(size_t i) { return &outputs[i]; }
};

class InferDataTypeContext {
 public:
  std::vector<ge::DataType> inputs, outputs;
  ge::DataType GetInputDataType(size_t i) const { return inputs[i]; }
  ge::graphStatus SetOutputDataType(size_t i, ge::DataType type) {
    return outputs[i] = type, ge::GRAPH_SUCCESS;
  }
};

}  // namespace gert

// What the sources registered, by the operator's name.
struct Registered {
  std::function<ge::graphStatus(gert::InferShapeContext*)> shapes;
  std::function<ge::graphStatus(gert::InferDataTypeContext*)> types;
  std::function<ge::graphStatus(gert::TilingContext*)> tiling;
};

inline std::map<std::string, Registered>& registry() {
  static std::map<std::string, Registered> all;
  return all;
}

class Registrar {
 public:
  explicit Registrar(const char* name) : name_(name) {}
  template <typename F>
  Registrar& InferShape(F f) {
    return registry()[name_].shapes = f, *this;
  }
  template <typename F>
  Registrar& InferDataType(F f) {
    return registry()[name_].types = f, *this;
  }
  template <typename F>
  Registrar& Tiling(F f) {
    return registry()[name_].tiling = f, *this;
  }
  template <typename Info, typename F>
  Registrar& TilingParse(F) {
    return *this;
  }

 private:
  std::string name_;
};

#define IMPL_OP_INFERSHAPE(name) static const Registrar shapes_of_##name = Registrar(#name)
#define IMPL_OP_OPTILING(name) static const Registrar tiling_of_##name = Registrar(#name)
