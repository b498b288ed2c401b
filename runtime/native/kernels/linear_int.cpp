// Products of 8-bit activations with weights in integer codes.
//
// One path for every number of rows: tiles of a few rows by a panel, codes unpacked in registers. Per element: exact
// integer sums per group, then total = fma(float(sum), weight scale * activation scale, total), groups in order.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cassert>

#include "kernels/declarations.h"
#include "kernels/epilogue.h"

#if defined(OPTIMC_AVX512)
#include "kernels/dot_avx512.h"
#elif defined(OPTIMC_AVX2)
#include "kernels/dot_avx2.h"
#else
#include "kernels/dot_portable.h"
#endif

namespace optimc::OPTIMC_ISA {

namespace {

#if defined(__x86_64__)
// As AMD and Intel define it: the base family, and what extends it if that is 15.
unsigned cpu_family() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return 0;
    const unsigned base = eax >> 8 & 0xf;
    return base == 0xf ? base + (eax >> 20 & 0xff) : base;
}
#endif

// How far ahead the cache is asked for weights: a page and a half. Measured: less comes late for 8-bit weights, two
// pages lose where a mapping's pages lie scattered.
constexpr std::int64_t kAheadBytes = 6144;
// The fewest rows with which it is asked. Intel's hardware reads one stream at half the speed of memory when left alone
// (measured: decode 144 tokens/s without asking, 290 with), AMD's of family 26 (Zen 5) a tenth slower. That of Zen 4 and
// before keeps up until products take long, and asking gets in its way.
std::int64_t fewest_rows_to_prefetch() {
#if defined(__x86_64__)
    constexpr unsigned kZen5 = 0x1a;
    static const std::int64_t rows = __builtin_cpu_is("amd") && cpu_family() < kZen5 ? 3 : 1;
    return rows;
#else
    return 1;
#endif
}

// sums[rows][32] = products of `rows` rows, at most kRows, with the panel at `data`.
template <int Bits, int kRows = kTileRows>
void dot_rows(std::int64_t rows, const PanelLayout& panel, const std::uint8_t* data, const QuantizedRows& x,
              std::int64_t row, const Ahead& ahead, float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return dot_rows<Bits, kRows - 1>(rows, panel, data, x, row, ahead, sums);
    }
    dot_tile<kRows, Bits>(panel, data, x, row, ahead, sums);
}

}  // namespace

void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t row_begin,
                std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end) {
    const bool gated = epilogue.gate != Gate::none;
    assert(0 <= panel_begin && panel_end <= weight.panels() && x.groups == weight.groups());
    assert(!gated || (panel_begin % 2 == 0 && panel_end % 2 == 0 && epilogue.residual.data == nullptr));
    const std::int64_t rows = row_end - row_begin;
    const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const auto dot = weight.bits == 4 ? dot_rows<4> : dot_rows<8>;
    const PanelLayout layout(weight);
    const std::uint8_t* end = weight.data + panel_end * layout.panel_bytes;
    const std::int64_t fewest_rows = fewest_rows_to_prefetch();
    alignas(64) float sums[2][kTileRows * kPanelRows];

    for (std::int64_t panel = panel_begin; panel < panel_end; panel += gated ? 2 : 1) {
        const std::uint8_t* data = weight.data + panel * layout.panel_bytes;
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
            // Tiles of equal height, give or take a row.
            const std::int64_t row = row_begin + rows * tile / tiles;
            const std::int64_t height = row_begin + rows * (tile + 1) / tiles - row;
            // The first tile to meet a panel asks for weights.
            const Ahead ahead = {tile == 0 && height >= fewest_rows ? kAheadBytes : 0, end};
            dot(height, layout, data, x, row, ahead, sums[0]);
            if (gated) dot(height, layout, data + layout.panel_bytes, x, row, ahead, sums[1]);
            finish_rows(epilogue, row, height, panel, sums[0], sums[1]);
        }
    }
}

}  // namespace optimc::OPTIMC_ISA
