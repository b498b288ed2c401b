// Products with floating-point weights: every output is one chain of multiply-adds over the features in order, so its
// bits depend neither on the other rows nor on the tile it falls into.
#include <cassert>

#include "kernels/declarations.h"
#include "kernels/epilogue.h"

namespace optimc::OPTIMC_ISA {

namespace {

// Tiles take what the registers hold: accumulators of kTileRows rows, the weights they share, one activation. Up to
// kWholePanelRows rows take a whole panel at once, more take its halves one after the other.
#if defined(OPTIMC_AVX512)
// There is room for 12 rows, but where rows are a multiple of 4 KB apart, only 8 find places in the L1 cache.
constexpr int kTileRows = 8;
constexpr int kWholePanelRows = 8;
#elif defined(OPTIMC_AVX2)
constexpr int kTileRows = 6;
constexpr int kWholePanelRows = 2;
#else
constexpr int kTileRows = 2;
constexpr int kWholePanelRows = 0;
#endif

// How far ahead weights of 2 bytes are prefetched. Widening them keeps the processor from running ahead on its own: 2
// to 16 rows gain 10 to 30%. With weights of 4 bytes up to 8 rows lose as much from it.
constexpr std::int64_t kPrefetchBytes = 4096;

struct Float32 {
    using Element = float;
    static constexpr bool kPrefetch = false;
    static Vec widen(const float* p) { return load(p); }
};
struct Bfloat16 {
    using Element = std::uint16_t;
    static constexpr bool kPrefetch = true;
    static Vec widen(const std::uint16_t* p) { return load_bf16(p); }
};
struct Float16 {
    using Element = std::uint16_t;
    static constexpr bool kPrefetch = true;
    static Vec widen(const std::uint16_t* p) { return load_f16(p); }
};

// sums[r][0 .. 16 * kVecs) of kRows rows, kPanelRows apart, with columns [0, 16 * kVecs) of the panel.
template <class Weights, int kRows, int kVecs>
void multiply(const typename Weights::Element* panel, std::int64_t features, ConstRows x, float* sums) {
    Vec acc[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) acc[r][v] = zero();
    }
    for (std::int64_t c = 0; c < features; ++c) {
        if constexpr (Weights::kPrefetch) {
            __builtin_prefetch(panel + c * kPanelRows + kPrefetchBytes / sizeof(typename Weights::Element));
        }
        Vec weight[kVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) weight[v] = Weights::widen(panel + c * kPanelRows + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Vec activation = broadcast(x.data[r * x.stride + c]);
#pragma GCC unroll 2
            for (int v = 0; v < kVecs; ++v) acc[r][v] = fma(activation, weight[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) store(sums + r * kPanelRows + v * kLanes, acc[r][v]);
    }
}

// sums[r] of `rows` rows, at most kRows, with the whole panel.
template <class Weights, int kRows = kTileRows>
void multiply_rows(int rows, const typename Weights::Element* panel, std::int64_t features, ConstRows x, float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<Weights, kRows - 1>(rows, panel, features, x, sums);
    }
    if constexpr (kRows <= kWholePanelRows) {
        multiply<Weights, kRows, 2>(panel, features, x, sums);
    } else {
        multiply<Weights, kRows, 1>(panel, features, x, sums);
        multiply<Weights, kRows, 1>(panel + kLanes, features, x, sums + kLanes);
    }
}

// Rows of the next tile of `left`: as many tiles as needed, of about the same size.
int next_tile(std::int64_t left) {
    const std::int64_t tiles = (left + kTileRows - 1) / kTileRows;
    return static_cast<int>((left + tiles - 1) / tiles);
}

// A panel, or the two of a gate, stays in the cache while all rows pass by.
template <class Weights>
void run(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin, std::int64_t row_end,
         std::int64_t panel_begin, std::int64_t panel_end) {
    const auto* data = static_cast<const typename Weights::Element*>(weight.data);
    const std::int64_t panel_size = weight.features * kPanelRows;
    const bool gated = epilogue.gate != Gate::none;
    alignas(64) float sums[kTileRows * kPanelRows];
    alignas(64) float up_sums[kTileRows * kPanelRows];
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += gated ? 2 : 1) {
        int rows;
        for (std::int64_t row = row_begin; row < row_end; row += rows) {
            rows = next_tile(row_end - row);
            const ConstRows tile = {x.data + row * x.stride, x.stride};
            multiply_rows<Weights>(rows, data + panel * panel_size, weight.features, tile, sums);
            if (gated) multiply_rows<Weights>(rows, data + (panel + 1) * panel_size, weight.features, tile, up_sums);
            finish_rows(epilogue, row, rows, panel, sums, up_sums);
        }
    }
}

}  // namespace

void linear_float(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                  std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end) {
    assert(0 <= panel_begin && panel_end <= weight.panels());
    assert(epilogue.gate == Gate::none || (panel_begin % 2 == 0 && panel_end % 2 == 0));
    assert(epilogue.gate == Gate::none || epilogue.residual.data == nullptr);
    switch (weight.type) {
        case FloatType::float32:
            return run<Float32>(weight, x, epilogue, row_begin, row_end, panel_begin, panel_end);
        case FloatType::bfloat16:
            return run<Bfloat16>(weight, x, epilogue, row_begin, row_end, panel_begin, panel_end);
        case FloatType::float16:
            return run<Float16>(weight, x, epilogue, row_begin, row_end, panel_begin, panel_end);
    }
}

}  // namespace optimc::OPTIMC_ISA
