// Python face of the probes. They choose the instruction set as a program does, and release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "isa/instruction_set.h"
#include "probe/probes.h"
#include "require.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace optimc {

namespace {

using Words = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr int kMostThreads = 1024;

void check_threads(int threads) {
    require(threads >= 1 && threads <= kMostThreads, "threads must be from 1 to " + std::to_string(kMostThreads));
}

double probe_read(const Words& words, int threads, int rounds) {
    check_threads(threads);
    require(rounds >= 1, "rounds must be at least 1");
    const std::size_t bytes = words.shape(0) * sizeof(std::uint64_t);
    require(bytes >= 512 * static_cast<std::size_t>(threads), "words must hold 512 bytes for every thread");
    const InstructionSet set = choose_instruction_set();
    const auto* data = reinterpret_cast<const std::byte*>(words.data());
    nb::gil_scoped_release release;
    return read_bandwidth(data, bytes, threads, rounds, set);
}

double probe_ops(double (*peak)(int, double, InstructionSet), int threads, double seconds) {
    check_threads(threads);
    require(seconds > 0 && seconds <= 60, "seconds must be above 0 and at most 60");
    const InstructionSet set = choose_instruction_set();
    nb::gil_scoped_release release;
    return peak(threads, seconds, set);
}

}  // namespace

}  // namespace optimc

void bind_probes(nb::module_& m) {
    using namespace optimc;
    m.def("probe_read", &probe_read, "words"_a.noconvert(), "threads"_a, "rounds"_a,
          "Bytes per second that all threads read together, each its part of words [n], in the best round.");
    m.def(
        "probe_int8_ops", [](int threads, double seconds) { return probe_ops(peak_int8_ops, threads, seconds); },
        "threads"_a, "seconds"_a, "8-bit multiplications and additions per second at best, all threads together.");
    m.def(
        "probe_float_ops", [](int threads, double seconds) { return probe_ops(peak_float_ops, threads, seconds); },
        "threads"_a, "seconds"_a, "float32 multiplications and additions per second at best, all threads together.");
}
