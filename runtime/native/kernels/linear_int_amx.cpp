// Products of 8-bit activations with weights in integer codes, on tiles (Intel AMX, int8).
//
// The bits are those of linear_int.cpp: integer sums are exact however they are added up, and what follows them is the
// same, total = fma(float(sum), weight scale * activation scale, total), groups in order. Few rows, and groups that are
// no whole number of tiles, are left to it.
#include <immintrin.h>

#include <cassert>

#include "kernels/declarations.h"
#include "kernels/epilogue.h"
#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

namespace {

// Rows of activations, and rows of weights, of a tile of sums; a panel is two tiles wide.
constexpr std::int64_t kTile = 16;
constexpr int kHalves = kPanelRows / static_cast<int>(kTile);
// Rows that pass by unpacked weights: many, so that unpacking pays, few, so that their sums stay in the nearest cache.
constexpr std::int64_t kChunkRows = 96;
// Features unpacked at a time.
constexpr std::int64_t kStretch = 128;
// With fewer rows tiles are mostly empty.
constexpr std::int64_t kFewestRows = kTile;

// What LDTILECFG reads. See Intel's Software Developer's Manual, volume 1, chapter 18.
struct alignas(64) TileShapes {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    // Tiles 0-3 hold sums, 4 and 5 `features` codes of activations, 6 and 7 as many codes of weights.
    explicit TileShapes(std::int64_t features) {
        for (int i = 0; i < 8; ++i) {
            const bool activations = i == 4 || i == 5;
            row_bytes[i] = activations ? static_cast<std::uint16_t>(features) : 64;
            rows[i] = i < 6 ? kTile : static_cast<std::uint8_t>(features / 4);
        }
    }
};

struct alignas(64) Scratch {
    std::int8_t weights[kHalves][kStretch * kTile];  // [feature / 4][16 rows][4 features]
    std::int32_t products[kChunkRows / kTile][kHalves][kTile * kTile];
    float sums[2][kChunkRows * kPanelRows];  // [1]: of the up panel, with a gate
};

// Features of a tile: the most that divide all groups. 0: tiles do not suit this weight.
std::int64_t tile_features(const PanelLayout& layout) {
    for (std::int64_t features : {64, 32, 16}) {
        if (layout.features % features == 0 && layout.last_features % features == 0) return features;
    }
    return 0;
}

// Whether all codes less their zeros fit a signed byte.
bool fits_signed(const PanelLayout& layout) {
    return layout.bits == 4 || (!layout.has_zeros && layout.zero_point == 128);
}

// Codes less zeros of features [begin, begin + count) of a group, as tiles of weights have them.
void unpack(const PanelLayout& layout, const WeightGroup& group, std::int64_t begin, std::int64_t count,
            std::int8_t (*out)[kStretch * kTile]) {
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int h = 0; h < kHalves; ++h) {
        __m512i zeros = _mm512_set1_epi8(static_cast<char>(layout.zero_point));
        if (layout.has_zeros) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.zeros + kTile * h));
            zeros = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(0x01010101));
        }
        const std::uint8_t* p = group.codes + begin * kPanelRows * layout.bits / 8 + 64 * h;
        std::int8_t* to = out[h];
        for (std::int64_t i = 0; i < count; i += 32 / layout.bits, p += 64 * kHalves) {
            const __m512i codes = _mm512_loadu_si512(p);
            if (layout.bits == 8) {
                _mm512_store_si512(to, _mm512_sub_epi8(codes, zeros));
                to += 64;
                continue;
            }
            const __m512i high = _mm512_and_si512(_mm512_srli_epi32(codes, 4), low_half);
            _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(codes, low_half), zeros));
            _mm512_store_si512(to + 64, _mm512_sub_epi8(high, zeros));
            to += 128;
        }
    }
}

// products[tile][half] of one or two tiles of rows with `count` features; continued unless `first`. Without
// `load_weights` tiles 6 and 7 hold them already.
template <bool kPair>
void multiply(const std::int8_t* codes, std::int64_t stride, const std::int8_t (*weights)[kStretch * kTile],
              std::int64_t count, std::int64_t features, bool first, bool load_weights,
              std::int32_t (*products)[kHalves][kTile * kTile]) {
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        if (kPair) _tile_zero(2);
        if (kPair) _tile_zero(3);
    } else {
        _tile_loadd(0, products[0][0], 64);
        _tile_loadd(1, products[0][1], 64);
        if (kPair) _tile_loadd(2, products[1][0], 64);
        if (kPair) _tile_loadd(3, products[1][1], 64);
    }
    for (std::int64_t i = 0; i < count; i += features) {
        if (load_weights) _tile_loadd(6, weights[0] + i * kTile, 64);
        _tile_loadd(4, codes + i, stride);
        _tile_dpbssd(0, 4, 6);
        if (load_weights) _tile_loadd(7, weights[1] + i * kTile, 64);
        _tile_dpbssd(1, 4, 7);
        if (kPair) {
            _tile_loadd(5, codes + kTile * stride + i, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, products[0][0], 64);
    _tile_stored(1, products[0][1], 64);
    if (kPair) _tile_stored(2, products[1][0], 64);
    if (kPair) _tile_stored(3, products[1][1], 64);
}

// sums[16][32] += products of a group, times their scales; x_scales are `groups` apart.
inline void add_group(const std::int32_t (*products)[kTile * kTile], const Vec (&scales)[kHalves],
                      const float* x_scales, std::int64_t groups, float* sums) {
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) {
        const __m512 x_scale = _mm512_set1_ps(x_scales[r * groups]);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
            float* sum = sums + r * kPanelRows + kTile * h;
            const __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(products[h] + r * kTile));
            const __m512 product_scale = _mm512_mul_ps(scales[h].v, x_scale);
            _mm512_store_ps(sum, _mm512_fmadd_ps(product, product_scale, _mm512_load_ps(sum)));
        }
    }
}

// sums[16 * tiles][32] = products of rows `row`.. with the panel at `data`.
void multiply_panel(const PanelLayout& layout, const std::uint8_t* data, const QuantizedRows& x, std::int64_t row,
                    std::int64_t tiles, std::int64_t features, Scratch& scratch, float* sums) {
    for (std::int64_t i = 0; i < tiles * kTile * kPanelRows; i += kLanes) store(sums + i, zero());
    const std::int8_t* codes = x.codes + row * x.stride;
    const float* x_scales = x.scales + row * x.groups;
    for (std::int64_t g = 0; g < layout.groups; ++g, ++x_scales) {
        const WeightGroup group = layout.group(data, g);
        const Vec scales[kHalves] = {layout.scales(group, 0), layout.scales(group, kTile)};
        const auto finish = [&](std::int64_t tile, std::int64_t count) {
            for (std::int64_t t = tile; t < tile + count; ++t) {
                add_group(scratch.products[t], scales, x_scales + t * kTile * x.groups, x.groups,
                          sums + t * kTile * kPanelRows);
            }
        };
        for (std::int64_t i = 0; i < group.features; i += kStretch) {
            const std::int64_t count = group.features - i < kStretch ? group.features - i : kStretch;
            unpack(layout, group, i, count, scratch.weights);
            // g++ does not know what loading a tile reads.
            asm volatile("" ::: "memory");
            const bool last = i + count == group.features;
            std::int64_t finished = 0;
            for (std::int64_t t = 0; t < tiles; t += 2) {
                const std::int8_t* from = codes + t * kTile * x.stride + i;
                const auto run = t + 1 < tiles ? multiply<true> : multiply<false>;
                run(from, x.stride, scratch.weights, count, features, i == 0, t == 0 || count > features,
                    scratch.products + t);
                // The tiles before, whose products have arrived meanwhile.
                if (last) finish(finished, t - finished);
                finished = t;
            }
            if (last) finish(finished, tiles - finished);
            codes += last ? group.features : 0;
        }
        data = group.next;
    }
}

}  // namespace

void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t row_begin,
                std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end) {
    const PanelLayout layout(weight);
    const std::int64_t features = fits_signed(layout) ? tile_features(layout) : 0;
    const std::int64_t in_tiles = features == 0 ? 0 : (row_end - row_begin) / kTile * kTile;
    const std::int64_t tiles_end = row_begin + in_tiles;
    if (in_tiles >= kFewestRows) {
        const bool gated = epilogue.gate != Gate::none;
        assert(0 <= panel_begin && panel_end <= weight.panels() && x.groups == weight.groups());
        assert(!gated || (panel_begin % 2 == 0 && panel_end % 2 == 0 && epilogue.residual.data == nullptr));
        const TileShapes shapes(features);
        _tile_loadconfig(&shapes);
        Scratch scratch;
        for (std::int64_t panel = panel_begin; panel < panel_end; panel += gated ? 2 : 1) {
            const std::uint8_t* data = weight.data + panel * layout.panel_bytes;
            for (std::int64_t row = row_begin; row < tiles_end; row += kChunkRows) {
                const std::int64_t rows = tiles_end - row < kChunkRows ? tiles_end - row : kChunkRows;
                multiply_panel(layout, data, x, row, rows / kTile, features, scratch, scratch.sums[0]);
                if (gated) {
                    multiply_panel(layout, data + layout.panel_bytes, x, row, rows / kTile, features, scratch,
                                   scratch.sums[1]);
                }
                finish_rows(epilogue, row, rows, panel, scratch.sums[0], scratch.sums[1]);
            }
        }
        // Without tiles in use a switch of threads need not save them.
        _tile_release();
    }
    if (tiles_end < row_end) {
        kernels_avx512()->linear_int(weight, x, epilogue, tiles_end, row_end, panel_begin, panel_end);
    }
}

}  // namespace optimc::OPTIMC_ISA
