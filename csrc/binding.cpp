// SPDX-License-Identifier: Apache-2.0
// The only file that knows Python: it exposes the native operators as tidal_connector._native.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, module) {
  module.doc() = "Native operators of tidal_connector; use tidal_connector.ops, which checks arguments.";
  module.def("version", [] { return TIDAL_VERSION; }, "Version of the package this library was built from.");
}
