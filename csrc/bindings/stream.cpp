// SPDX-License-Identifier: Apache-2.0

#include "tidal/stream.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "copy_arguments.h"

namespace nb = nanobind;

namespace {

constexpr double kLongest = 1e8;  // seconds; more would overflow the clock

// Checked once, submitted often. The caller keeps the arrays alive.
struct MoveSet {
  std::vector<tidal::Move> moves;

  MoveSet(const std::vector<SourceArray>& sources, const std::vector<DestinationArray>& destinations) {
    if (sources.size() != destinations.size()) throw std::invalid_argument("a move lacks its other side");
    for (size_t i = 0; i < sources.size(); ++i) {
      moves.push_back({rows_of<const uint8_t>(sources[i]), rows_of<uint8_t>(destinations[i])});
      if (moves[i].source.row_bytes != moves[i].destination.row_bytes)
        throw std::invalid_argument("shapes differ");
    }
  }
};

// In a forked process the stream is left alone for ever: its threads and the owner of its locks are not
// there.
struct Leave {
  void operator()(tidal::CopyStream* stream) const {
    if (stream->usable()) delete stream;
  }
};

class Stream {
 public:
  Stream(int threads, int path) : path_(path_of(path)), stream_(new tidal::CopyStream(threads)) {}

  int64_t submit(const MoveSet& set, int64_t first, int64_t count, const IndexArray& source_rows,
                 const IndexArray& destination_rows, int64_t after, bool wake) {
    const auto all = static_cast<int64_t>(set.moves.size());
    if (first < 0 || count < 1 || first > all - count) throw std::invalid_argument("no such moves");
    const auto rows = static_cast<int64_t>(source_rows.shape(0));
    if (static_cast<int64_t>(destination_rows.shape(0)) != rows) throw std::invalid_argument("shapes differ");
    check(after);
    int64_t sources = INT64_MAX;
    int64_t destinations = INT64_MAX;
    for (int64_t i = first; i < first + count; ++i) {
      sources = std::min(sources, set.moves[static_cast<size_t>(i)].source.rows());
      destinations = std::min(destinations, set.moves[static_cast<size_t>(i)].destination.rows());
    }
    const int64_t wrong_source = tidal::first_outside(source_rows.data(), rows, sources);
    if (wrong_source >= 0) return ~wrong_source;
    const int64_t wrong = tidal::first_outside(destination_rows.data(), rows, destinations);
    if (wrong >= 0) return ~(rows + wrong);
    std::shared_ptr<tidal::RowNumbers> numbers = stream_->numbers(rows);
    numbers->fill(source_rows.data(), destination_rows.data(), rows);
    return stream_->submit(set.moves.data() + first, count, std::move(numbers), after, path_, wake);
  }

  int wait(int64_t ticket, double seconds) {
    if (done(ticket))
      return static_cast<int>(tidal::Waited::kReady);  // without letting go of the interpreter
    const nb::gil_scoped_release release;
    return static_cast<int>(stream_->wait(ticket, deadline_in(seconds)));
  }

  int settle(int64_t ticket, double seconds) {
    check(ticket);
    const nb::gil_scoped_release release;
    return static_cast<int>(stream_->settle(ticket, deadline_in(seconds)));
  }

  bool done(int64_t ticket) {
    check(ticket);
    return stream_->done(ticket);
  }

  std::tuple<int64_t, int64_t, double, double, double, int64_t> statistics() {
    const tidal::StreamStatistics now = stream_->statistics();
    return {now.jobs, now.bytes, now.busy_seconds, now.stolen_seconds, now.waited_seconds, now.late};
  }

  void close() {
    const nb::gil_scoped_release release;
    stream_->close();
  }

 private:
  void check(int64_t ticket) {
    const int64_t newest = stream_->newest();
    if (ticket < 0 || ticket > newest)
      throw std::invalid_argument("ticket " + std::to_string(ticket) + ": expected at least 0, at most " +
                                  std::to_string(newest));
  }

  static tidal::CopyStream::Clock::time_point deadline_in(double seconds) {
    const std::chrono::duration<double> patience(std::clamp(seconds, 0.0, kLongest));
    return tidal::CopyStream::Clock::now() +
           std::chrono::duration_cast<tidal::CopyStream::Clock::duration>(patience);
  }

  const tidal::CopyPath path_;
  std::unique_ptr<tidal::CopyStream, Leave> stream_;
};

}  // namespace

void bind_stream(nb::module_& module) {
  nb::class_<MoveSet>(module, "MoveSet")
      .def(nb::init<const std::vector<SourceArray>&, const std::vector<DestinationArray>&>(),
           nb::arg("sources"), nb::arg("destinations"));
  nb::class_<Stream>(module, "CopyStream",
                     "Threads that copy rows; tidal_connector.ops.CopyStream checks arguments.")
      .def(nb::init<int, int>(), nb::arg("threads"), nb::arg("path"))
      .def("submit", &Stream::submit, nb::arg("moves"), nb::arg("first"), nb::arg("count"),
           nb::arg("source_rows").noconvert(), nb::arg("destination_rows").noconvert(), nb::arg("after"),
           nb::arg("wake"),
           "Queue a copy for each move; return the first ticket, or ~position of the first index outside.")
      .def("wait", &Stream::wait, nb::arg("ticket"), nb::arg("seconds"))
      .def("settle", &Stream::settle, nb::arg("ticket"), nb::arg("seconds"))
      .def("done", &Stream::done, nb::arg("ticket"))
      .def("statistics", &Stream::statistics)
      .def("close", &Stream::close);
}
