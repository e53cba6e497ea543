// SPDX-License-Identifier: Apache-2.0
// tidal_connector._native. Only this folder knows Python.

#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "Native operators of tidal_connector; use tidal_connector.ops, which checks arguments.";
  module.def("version", [] { return TIDAL_VERSION; }, "Version of the package this library was built from.");
  bind_copy(module);
  bind_stream(module);
  bind_resolve(module);
  bind_gather_selection(module);
}
