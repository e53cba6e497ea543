// SPDX-License-Identifier: Apache-2.0
// Definitions of operators, as far as ours say them; see op_impl_registry.h.

#pragma once

#include <deque>

#include "op_impl_registry.h"

enum Option { REQUIRED, OPTIONAL };

class OpParamDef {
 public:
  std::string name;
  Option kind = OPTIONAL;
  std::vector<ge::DataType> types;
  std::vector<ge::Format> formats, unknown;
  bool contiguous = false;

  OpParamDef& ParamType(Option option) { return kind = option, *this; }
  OpParamDef& DataType(std::vector<ge::DataType> given) { return types = given, *this; }
  OpParamDef& Format(std::vector<ge::Format> given) { return formats = given, *this; }
  OpParamDef& UnknownShapeFormat(std::vector<ge::Format> given) { return unknown = given, *this; }
  OpParamDef& AutoContiguous() { return contiguous = true, *this; }
};

class OpAttrDef {
 public:
  std::string name;
  Option kind = REQUIRED;
  int64_t value = 0;
  OpAttrDef& AttrType(Option option) { return kind = option, *this; }
  OpAttrDef& Int(int64_t given) { return value = given, *this; }
};

class OpAICoreDef {
 public:
  std::vector<std::string> socs;
  OpAICoreDef& AddConfig(const char* soc) { return socs.push_back(soc), *this; }
};

class OpDef {
 public:
  std::string name;
  std::deque<OpParamDef> inputs, outputs;
  std::deque<OpAttrDef> attrs;
  OpAICoreDef core;

  explicit OpDef(const char* given) : name(given) {}
  OpParamDef& Input(const char* given) { return Added(inputs, given); }
  OpParamDef& Output(const char* given) { return Added(outputs, given); }
  OpAttrDef& Attr(const char* given) { return Added(attrs, given); }
  OpAICoreDef& AICore() { return core; }

 private:
  template <typename T>
  static T& Added(std::deque<T>& all, const char* given) {
    all.emplace_back();
    all.back().name = given;
    return all.back();
  }
};

inline std::map<std::string, OpDef>& definitions() {
  static std::map<std::string, OpDef> all;
  return all;
}

#define OP_ADD(name) static const bool added_##name = definitions().emplace(#name, name(#name)).second
