// SPDX-License-Identifier: Apache-2.0

#include "tidal/resolve.h"

#include <nanobind/ndarray.h>

#include "bindings.h"

namespace nb = nanobind;

namespace {

template <class T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::device::cpu>;
template <class T, int kDims>
using Dense = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

// Long-lived arrays are looked at once: that halves the time of a small call. The views keep them alive.
struct SeatsView {
  SeatsView(Dense<int32_t, 1> capacity, Dense<int32_t, 2> extents, int64_t extent_rows)
      : capacity(std::move(capacity)), extents(std::move(extents)), extent_rows(extent_rows) {}
  tidal::Seats seats() const {
    return {capacity.data(), extents.data(), static_cast<int64_t>(capacity.shape(0)),
            static_cast<int64_t>(extents.shape(1)), extent_rows};
  }
  Dense<int32_t, 1> capacity;
  Dense<int32_t, 2> extents;
  int64_t extent_rows;
};

struct SlotStateView {
  SlotStateView(Dense<int32_t, 1> held, Dense<int32_t, 1> order, Dense<uint8_t, 1> listed,
                Dense<int32_t, 1> filled, Dense<int32_t, 1> length)
      : held(std::move(held)),
        order(std::move(order)),
        listed(std::move(listed)),
        filled(std::move(filled)),
        length(std::move(length)) {}
  tidal::SlotState state() const {
    return {held.data(),
            order.data(),
            listed.data(),
            filled.data(),
            length.data(),
            static_cast<int64_t>(held.shape(0)),
            static_cast<int64_t>(listed.shape(0))};
  }
  Dense<int32_t, 1> held, order;
  Dense<uint8_t, 1> listed;
  Dense<int32_t, 1> filled, length;
};

struct ResolveBuffersView {
  ResolveBuffersView(Dense<int32_t, 1> slots, Dense<int32_t, 1> written, Dense<int32_t, 1> miss_start,
                     Dense<int64_t, 1> miss_rows, Dense<int64_t, 1> miss_slots)
      : slots(std::move(slots)),
        written(std::move(written)),
        miss_start(std::move(miss_start)),
        miss_rows(std::move(miss_rows)),
        miss_slots(std::move(miss_slots)) {}
  Dense<int32_t, 1> slots, written, miss_start;
  Dense<int64_t, 1> miss_rows, miss_slots;
};

nb::tuple answer(tidal::ResolveStatus status, const tidal::ResolveCounts& counts = {}) {
  return nb::make_tuple(static_cast<int>(status), counts.fetched, counts.hits, counts.misses,
                        counts.fetched - counts.misses, counts.evictions, counts.invalid);
}

nb::tuple resolve(const SlotStateView& state_view, const SeatsView& seats_view,
                  const ResolveBuffersView& buffers, const Array<const int32_t, 2>& selected,
                  const Array<const int32_t, 1>& query_start, const Array<const int32_t, 1>& seat,
                  const Array<const int32_t, 1>& start, const Array<const int32_t, 2>& pages,
                  int64_t page_tokens, int64_t eager_rows, int threads) {
  const auto queries = static_cast<int64_t>(selected.shape(0));
  const auto width = static_cast<int64_t>(selected.shape(1));
  const auto requests = static_cast<int64_t>(seat.shape(0));
  const auto dense = [](const auto& array, size_t axis) {
    return array.shape(axis) <= 1 || array.stride(axis) == 1;
  };
  const tidal::SlotState state = state_view.state();
  const tidal::Seats seats = seats_view.seats();
  const bool fits = seats.count == state.seats && query_start.shape(0) == seat.shape(0) + 1 &&
                    start.shape(0) == seat.shape(0) && pages.shape(0) == seat.shape(0) && page_tokens >= 1 &&
                    dense(selected, 1) && dense(pages, 1) && dense(query_start, 0) && dense(seat, 0) &&
                    dense(start, 0);
  const bool room = static_cast<int64_t>(buffers.slots.shape(0)) >= queries * width &&
                    static_cast<int64_t>(buffers.written.shape(0)) >= queries &&
                    static_cast<int64_t>(buffers.miss_start.shape(0)) > requests &&
                    buffers.miss_rows.shape(0) == buffers.miss_slots.shape(0);
  if (!fits || !room) return answer(tidal::ResolveStatus::kRefused);
  const tidal::SelectionBatch batch{selected.data(),
                                    selected.stride(0),
                                    queries,
                                    width,
                                    query_start.data(),
                                    seat.data(),
                                    start.data(),
                                    requests,
                                    pages.data(),
                                    pages.stride(0),
                                    static_cast<int64_t>(pages.shape(1)),
                                    page_tokens};
  const tidal::ResolveOutput out{buffers.slots.data(),      buffers.written.data(),
                                 buffers.miss_start.data(), buffers.miss_rows.data(),
                                 buffers.miss_slots.data(), static_cast<int64_t>(buffers.miss_rows.shape(0))};
  tidal::Resolution result;
  {
    const nb::gil_scoped_release release;
    result = tidal::resolve(state, seats, batch, out, eager_rows, threads);
  }
  return answer(result.status, result.counts);
}

}  // namespace

void bind_resolve(nb::module_& module) {
  nb::class_<SeatsView>(module, "SeatsView")
      .def(nb::init<Dense<int32_t, 1>, Dense<int32_t, 2>, int64_t>(), nb::arg("capacity").noconvert(),
           nb::arg("extents").noconvert(), nb::arg("extent_rows"));
  nb::class_<SlotStateView>(module, "SlotStateView")
      .def(nb::init<Dense<int32_t, 1>, Dense<int32_t, 1>, Dense<uint8_t, 1>, Dense<int32_t, 1>,
                    Dense<int32_t, 1>>(),
           nb::arg("held").noconvert(), nb::arg("order").noconvert(), nb::arg("listed").noconvert(),
           nb::arg("filled").noconvert(), nb::arg("length").noconvert());
  nb::class_<ResolveBuffersView>(module, "ResolveBuffersView")
      .def(nb::init<Dense<int32_t, 1>, Dense<int32_t, 1>, Dense<int32_t, 1>, Dense<int64_t, 1>,
                    Dense<int64_t, 1>>(),
           nb::arg("slots").noconvert(), nb::arg("written").noconvert(), nb::arg("miss_start").noconvert(),
           nb::arg("miss_rows").noconvert(), nb::arg("miss_slots").noconvert());
  module.def("resolve", &resolve, nb::arg("state"), nb::arg("seats"), nb::arg("buffers"),
             nb::arg("selected").noconvert(), nb::arg("query_start").noconvert(), nb::arg("seat").noconvert(),
             nb::arg("start").noconvert(), nb::arg("pages").noconvert(), nb::arg("page_tokens"),
             nb::arg("eager_rows"), nb::arg("threads"),
             "Resolve a batch; return status, fetched, hits, misses, loads, evictions, invalid.");
}
