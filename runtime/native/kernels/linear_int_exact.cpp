// Products of float32 activations with weights in integer codes: weights are dequantized, and every output is one chain
// of multiply-adds over the features in order, so its bits depend neither on the other rows nor on its tile.
#include <cassert>

#include "kernels/declarations.h"
#include "kernels/dequantize.h"
#include "kernels/epilogue.h"

namespace optimc::OPTIMC_ISA {

namespace {

// Tiles are as large as the registers hold: accumulators of kTileRows rows, the weights they share, one activation.
#if defined(OPTIMC_AVX512)
constexpr int kTileRows = 6;
constexpr int kTileVecs = 2;
#elif defined(OPTIMC_AVX2)
constexpr int kTileRows = 6;
constexpr int kTileVecs = 1;
#else
constexpr int kTileRows = 2;
constexpr int kTileVecs = 1;
#endif

// Features dequantized at a time, and rows that pass by while they are in the cache.
constexpr int kStretch = 64;
constexpr int kChunkRows = 96;

struct Scratch {
    float weights[kStretch * kPanelRows];
    float sums[2][kChunkRows * kPanelRows];  // [1]: of the up panel, with a gate
};

// sums[r][0 .. 16 * kTileVecs) of kRows rows, kPanelRows apart, continued over `features` features.
template <int kRows>
void multiply(const float* weights, std::int64_t features, ConstRows x, float* sums) {
    Vec acc[kRows][kTileVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kTileVecs; ++v) acc[r][v] = load(sums + r * kPanelRows + v * kLanes);
    }
    for (std::int64_t c = 0; c < features; ++c) {
        Vec weight[kTileVecs];
#pragma GCC unroll 2
        for (int v = 0; v < kTileVecs; ++v) weight[v] = load(weights + c * kPanelRows + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Vec activation = broadcast(x.data[r * x.stride + c]);
#pragma GCC unroll 2
            for (int v = 0; v < kTileVecs; ++v) acc[r][v] = fma(activation, weight[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kTileVecs; ++v) store(sums + r * kPanelRows + v * kLanes, acc[r][v]);
    }
}

// The same for `rows` rows, at most kRows, and the whole panel.
template <int kRows = kTileRows>
void multiply_rows(std::int64_t rows, const float* weights, std::int64_t features, ConstRows x, float* sums) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return multiply_rows<kRows - 1>(rows, weights, features, x, sums);
    }
    for (int n = 0; n < kPanelRows; n += kTileVecs * kLanes) multiply<kRows>(weights + n, features, x, sums + n);
}

// sums[rows][32] = products of `rows` rows, at most kChunkRows, with the panel at `data`.
void multiply_panel(const IntWeight& weight, const PanelLayout& layout, const std::uint8_t* data, ConstRows x,
                    std::int64_t rows, float* weights, float* sums) {
    for (std::int64_t i = 0; i < rows * kPanelRows; i += kLanes) store(sums + i, zero());
    for (std::int64_t g = 0; g < layout.groups; ++g) {
        const WeightGroup group = layout.group(data, g);
        const std::int64_t features = weight.group_features(g);
        for (std::int64_t i = 0; i < features; i += kStretch) {
            const std::int64_t padded = group.features - i < kStretch ? group.features - i : kStretch;
            const auto unpack = layout.bits == 4 ? dequantize<4> : dequantize<8>;
            unpack(layout, group, i, padded, weights);
            const std::int64_t count = features - i < kStretch ? features - i : kStretch;
            for (std::int64_t row = 0; row < rows; row += kTileRows) {
                const ConstRows tile = {x.data + row * x.stride + g * weight.group + i, x.stride};
                multiply_rows(rows - row, weights, count, tile, sums + row * kPanelRows);
            }
        }
        data = group.next;
    }
}

}  // namespace

std::size_t linear_int_exact_scratch() { return sizeof(Scratch); }

void linear_int_exact(const IntWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                      std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end, std::byte* scratch) {
    const bool gated = epilogue.gate != Gate::none;
    assert(0 <= panel_begin && panel_end <= weight.panels());
    assert(!gated || (panel_begin % 2 == 0 && panel_end % 2 == 0 && epilogue.residual.data == nullptr));
    auto& [weights, sums] = *reinterpret_cast<Scratch*>(scratch);
    const PanelLayout layout(weight);
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += gated ? 2 : 1) {
        const std::uint8_t* data = weight.data + panel * layout.panel_bytes;
        for (std::int64_t row = row_begin; row < row_end; row += kChunkRows) {
            const std::int64_t rows = row_end - row < kChunkRows ? row_end - row : kChunkRows;
            const ConstRows chunk = {x.data + row * x.stride, x.stride};
            multiply_panel(weight, layout, data, chunk, rows, weights, sums[0]);
            if (gated) multiply_panel(weight, layout, data + layout.panel_bytes, chunk, rows, weights, sums[1]);
            finish_rows(epilogue, row, rows, panel, sums[0], sums[1]);
        }
    }
}

}  // namespace optimc::OPTIMC_ISA
