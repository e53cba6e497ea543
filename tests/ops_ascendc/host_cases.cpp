// SPDX-License-Identifier: Apache-2.0
// Linked with the operators' host sources and the stand-in of CANN's host interface: prints what they define,
// and what their functions answer to one call each. test_op_host.py reads it.

#include <cstdio>
#include <cstring>

#include "register/op_def_registry.h"
#include "tidal_miss_tiling.h"
#include "tidal_selection_tiling.h"

namespace {

using Dims = std::vector<int64_t>;
const char* const kTypes[] = {"float16", "bfloat16", "int8", "int32", "float"};

void Say(const char* what, const OpParamDef& parameter) {
  std::printf("%s %s %s %s", what, parameter.name.c_str(),
              parameter.kind == REQUIRED ? "required" : "optional",
              parameter.contiguous ? "contiguous" : "strided");
  for (const ge::DataType type : parameter.types) std::printf(" %s", kTypes[type]);
  std::printf(" %zu %zu\n", parameter.formats.size(), parameter.unknown.size());
}

void SayShapes(const char* op, std::vector<Dims> inputs, size_t outputs) {
  gert::InferShapeContext shapes;
  gert::InferDataTypeContext types;
  for (const Dims& dims : inputs) {
    shapes.inputs.push_back({dims});
    types.inputs.push_back(ge::DT_BF16);
  }
  shapes.outputs.resize(outputs);
  types.outputs.resize(outputs, ge::DT_FLOAT);
  std::printf("infer %s %u %u", op, registry()[op].shapes(&shapes), registry()[op].types(&types));
  for (size_t i = 0; i < outputs; ++i) {
    std::printf(" %s[", kTypes[types.outputs[i]]);
    for (const int64_t dim : shapes.outputs[i].dims) std::printf("%ld,", static_cast<long>(dim));
    std::printf("]");
  }
  std::printf("\n");
}

// The first inputs named by `rows` are bfloat16, the others int32.
gert::TilingContext Context(const std::vector<Dims>& inputs, const std::vector<size_t>& rows,
                            const Dims& last, size_t outputs) {
  gert::TilingContext context;
  for (const Dims& dims : inputs) {
    gert::StorageShape shape;
    shape.shape.dims = dims;
    context.input_shapes.push_back(shape);
    context.input_descs.push_back({ge::DT_INT32});
  }
  for (const size_t i : rows) context.input_descs[i].type = ge::DT_BF16;
  context.output_shapes.resize(outputs);
  context.output_shapes.back().shape.dims = last;
  context.output_descs.resize(outputs, {ge::DT_INT32});
  context.platform = {40, 192 * 1024, 1000};
  context.tiling.bytes.resize(4096);
  context.attrs.first = 1;
  return context;
}

template <typename Tiling>
void SayTiling(const char* op, gert::TilingContext context) {
  const ge::graphStatus status = registry()[op].tiling(&context);
  Tiling tiling;
  std::memcpy(&tiling, context.tiling.bytes.data(), sizeof(tiling));
  std::printf("tiling %s %u key %lu blocks %u schedule %u workspace %zu data %d rows %ld kv %ld\n", op,
              status, static_cast<unsigned long>(context.key), context.blocks, context.schedule,
              context.workspaces[0], context.tiling.used == sizeof(Tiling), static_cast<long>(tiling.rows),
              static_cast<long>(tiling.copy.kv_bytes));
}

}  // namespace

int main() {
  for (const auto& [name, op] : definitions()) {
    std::printf("op %s", name.c_str());
    for (const std::string& soc : op.core.socs) std::printf(" %s", soc.c_str());
    std::printf("\n");
    for (const OpParamDef& each : op.inputs) Say("input", each);
    for (const OpParamDef& each : op.outputs) Say("output", each);
    for (const OpAttrDef& each : op.attrs) {
      std::printf("attribute %s %d %ld\n", each.name.c_str(), each.kind == OPTIONAL,
                  static_cast<long>(each.value));
    }
  }
  const std::vector<Dims> selection = {{32, 128, 64}, {32, 128, 512}, {2, 16}, {2, 1, 2049}, {2, 1, 2048},
                                       {64, 128, 64}, {64, 128, 512}, {2, 64}, {2},          {2}};
  const std::vector<Dims> misses = {
      {32, 128, 64}, {32, 128, 512}, {64, 128, 64}, {64, 128, 512}, {2, 4098}, {2, 4098}, {2}};
  SayShapes("GatherSelectionKvCache", selection, 5);
  SayShapes("GatherMissRows", misses, 2);
  const auto good = Context(selection, {0, 1, 5, 6}, {2}, 5);
  SayTiling<tidal::SelectionTiling>("GatherSelectionKvCache", good);
  SayTiling<tidal::MissTiling>("GatherMissRows", Context(misses, {0, 1, 2, 3}, {32, 128, 512}, 2));
  auto bad = good;
  bad.input_shapes[9].shape.dims = {3};
  SayTiling<tidal::SelectionTiling>("GatherSelectionKvCache", bad);
  auto small = good;
  small.tiling.bytes.resize(8);
  std::printf("small %u\n", registry()["GatherSelectionKvCache"].tiling(&small));
}
