// SPDX-License-Identifier: Apache-2.0
// One function for each operator: it adds the operator to the Python module.

#pragma once

#include <nanobind/nanobind.h>

void bind_copy(nanobind::module_& module);
void bind_stream(nanobind::module_& module);
void bind_resolve(nanobind::module_& module);
void bind_gather_selection(nanobind::module_& module);
