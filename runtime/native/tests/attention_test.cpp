// The attention kernels equal their reference.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/kv_layout.h"
#include "kernels/reference/attention_reference.h"
#include "tests/attention_world.h"
#include "tests/check.h"

using namespace optimc;
using namespace optimc::test;

namespace {

constexpr int kBlockSizes[] = {1, 4, 8, 16, 32, 48};

// Sums of up to a few hundred float32 products, and the exponential's 2 ulp; in pairs of bfloat16, queries and weights
// are rounded to 8 bits.
double tolerance(InstructionSet set, KvType type) {
    return set == InstructionSet::avx512_bf16 && type != KvType::float32 ? 8e-3 : 1e-5;
}

float of_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// x without the bits that bfloat16 lacks.
float truncated_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return of_bits(bits & 0xffff0000u);
}

// All that varies beside type, block size and head dimension: taken in turn, so that every pair meets.
void vary(AttentionShape& shape, unsigned turn) {
    constexpr int groups[] = {1, 2, 3, 4, 8};
    constexpr int windows[] = {0, 1, 37, 200};
    constexpr float caps[] = {0, 0, 5};
    shape.group = groups[turn % 5];
    shape.kv_heads = 1 + static_cast<int>(turn / 5 % 3);
    shape.window = windows[turn / 2 % 4];
    shape.softcap = caps[turn % 3];
    shape.rotary_dim = turn % 7 < 2 ? 0 : turn % 7 < 5 ? shape.head_dim : shape.head_dim / 4 * 2;
    shape.interleaved = turn % 2 == 1;
}

void expect_reference(const AttentionShape& shape, InstructionSet set) {
    AttentionWorld world(shape, set);
    const int mixed = world.add({shape, 75, 1}), prompt = world.add({shape, 40, 2});
    const int decode = world.add({shape, 291, 3});
    world.step({{mixed, 0, 70}});
    world.step({{decode, 0, 290}});
    const std::vector<AttentionPart> parts{{mixed, 70, 75}, {prompt, 0, 40}, {decode, 290, 291}};
    const std::vector<float> got = world.step(parts, 2), want = world.reference(parts);
    const double error = relative_error(got.data(), want.data(), want.size());
    CHECK_MESSAGE(error < tolerance(set, shape.kind.type),
                  std::string(name_of(set)) + " " + shape.name() + ": " + std::to_string(error));
}

}  // namespace

TEST("attention matches its reference: types, block sizes, head dimensions, groups, windows, caps, rotation") {
    for (InstructionSet set : supported_instruction_sets()) {
        unsigned turn = 0;
        for (const KvKind& kind : kKvKinds) {
            for (int block_size : kBlockSizes) {
                for (int head_dim : {8, 24, 64, 80, 128}) {
                    AttentionShape shape{.kind = kind, .block_size = block_size, .head_dim = head_dim};
                    vary(shape, turn++);
                    expect_reference(shape, set);
                }
            }
        }
    }
}

TEST("attention matches its reference: odd and large head dimensions, blocks of 256, many heads on one") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            expect_reference({.kind = kind, .head_dim = 5}, set);
            expect_reference({.kind = kind, .kv_heads = 1, .group = 1, .head_dim = 256}, set);
            expect_reference({.kind = kind, .block_size = 256, .kv_heads = 1, .group = 71, .head_dim = 16}, set);
            expect_reference({.kind = kind, .block_size = 255, .kv_heads = 1, .head_dim = kMaxHeadDim}, set);
        }
    }
}

TEST("attention to a tree matches its reference, beside a prompt and a token that is decoded") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            for (int block_size : kBlockSizes) {
                for (std::int64_t window : {0, 3, 40}) {
                    const AttentionShape shape{.kind = kind, .block_size = block_size, .group = 3, .window = window};
                    AttentionWorld world(shape, set);
                    world.backwards = block_size % 2 == 0;
                    const int tree = world.add({shape, 80, 1}), prompt = world.add({shape, 70, 2}),
                              decode = world.add({shape, 61, 3});
                    world.step({{tree, 0, 70}, {decode, 0, 60}});
                    const std::vector<AttentionPart> parts{
                        {prompt, 0, 70}, {tree, 70, 80, {-1, -1, 0, 0, 1, 2, 2, 5, 7, 4}}, {decode, 60, 61}};
                    const std::vector<float> got = world.step(parts, 3), want = world.reference(parts);
                    const double error = relative_error(got.data(), want.data(), want.size());
                    CHECK_MESSAGE(error < tolerance(set, kind.type), shape.name() + ": " + std::to_string(error));
                }
            }
        }
    }
}

TEST("attention: where all scores are equal every visible value counts once, and no other") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (KvType type : {KvType::float32, KvType::bfloat16}) {
            for (int block_size : {1, 16, 48}) {
                for (std::int64_t window : {0, 1, 2, 3, 37}) {
                    const AttentionShape shape{
                        .kind = {type, false}, .block_size = block_size, .group = 3, .window = window};
                    AttentionTokens one(shape, 90, 1), other(shape, 75, 2);
                    for (AttentionTokens* tokens : {&one, &other}) {
                        for (float& x : tokens->q) x = 0;
                    }
                    AttentionWorld world(shape, set);
                    const int tree = world.add(one), prompt = world.add(other);
                    world.step({{tree, 0, 79}});
                    const std::vector<AttentionPart> parts{{tree, 79, 90, {-1, -1, 0, 0, 1, 2, 2, 5, 7, 4, 9}},
                                                           {prompt, 0, 75}};
                    const std::vector<float> got = world.step(parts, 2), want = world.reference(parts);
                    const double error = relative_error(got.data(), want.data(), want.size());
                    CHECK_MESSAGE(error < 1e-6, std::string(name_of(set)) + " " + shape.name() + ": " +
                                                    std::to_string(error));
                }
            }
        }
    }
}

TEST("attention: scores far apart neither overflow nor vanish") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            const AttentionShape shape{.kind = kind};
            AttentionTokens tokens(shape, 300, 1);
            // Of numbers that products in pairs need not round: a rounded score of thousands is another score.
            for (float& x : tokens.q) x = truncated_bf16(300 * x);
            if (kind.channel_keys && set == InstructionSet::avx512_bf16) continue;  // there queries take in scales
            AttentionWorld world(shape, set);
            world.add(tokens);
            const std::vector<float> got = world.step({{0, 0, 300}}), want = world.reference({{0, 0, 300}});
            // Scores of a few thousand carry an absolute error near 1e-3, which is the relative error of a weight.
            const double error = relative_error(got.data(), want.data(), want.size());
            CHECK_MESSAGE(error < std::max(5e-3, tolerance(set, kind.type)),
                          std::string(name_of(set)) + " " + shape.name() + ": " + std::to_string(error));
        }
    }
}

TEST("attention_store rounds keys and values as its types say") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            for (int head_dim : {5, 24, 64, 80}) {
                const AttentionShape shape{.kind = kind, .head_dim = head_dim};
                AttentionTokens tokens(shape, 40, 1);
                const int width = shape.kv_heads * head_dim;
                for (int i = 0; i < width; ++i) tokens.k[3 * width + i] = tokens.v[3 * width + i] = 0;
                tokens.k[5 * width] = 3e38f;
                tokens.v[5 * width] = -3e38f;
                AttentionWorld world(shape, set);
                world.add(tokens);
                world.step({{0, 0, 40}});
                for (int t = 0; t < 40; ++t) {
                    const auto check = [&, type = kind.type](const float* x, const std::vector<double>& held) {
                        double low = x[0], high = x[0];
                        for (int d = 0; d < head_dim; ++d) low = std::fmin(low, x[d]), high = std::fmax(high, x[d]);
                        const double step = type == KvType::int8 ? std::fmax(-low, high) / 127 : (high - low) / 15;
                        for (int d = 0; d < head_dim; ++d) {
                            const double allowed = type == KvType::float32    ? 0
                                                   : type == KvType::bfloat16 ? std::fabs(x[d]) / 256
                                                                              : step * 0.50001;
                            CHECK(std::fabs(x[d] - held[d]) <= allowed);
                        }
                    };
                    if (!kind.channel_keys) {
                        check(&tokens.k[t * width + head_dim],
                              reference::cached_key(world.layer(), world.slot(0, t), 1));
                    }
                    check(&tokens.v[t * width + head_dim], reference::cached_value(world.layer(), world.slot(0, t), 1));
                    check(&tokens.v[t * width], reference::cached_value(world.layer(), world.slot(0, t), 0));
                }
            }
        }
    }
}

TEST("attention_store: keys with scales of channels are rounded with them and saturate") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (KvType type : {KvType::int8, KvType::int4}) {
            for (int head_dim : {5, 24, 64, 80}) {
                const AttentionShape shape{.kind = {type, true}, .head_dim = head_dim};
                AttentionTokens tokens(shape, 40, 1);
                const int width = shape.kv_heads * head_dim;
                tokens.k[5 * width + 2] = 3e38f;
                tokens.k[5 * width + head_dim + 3] = -3e38f;
                AttentionWorld world(shape, set);
                world.add(tokens);
                world.step({{0, 0, 40}});
                const KvLayer& layer = world.layer();
                int saturated = 0;
                for (int t = 0; t < 40; ++t) {
                    for (int i = 0; i < width; ++i) {
                        const std::vector<double> held = reference::cached_key(layer, world.slot(0, t), i / head_dim);
                        const double scale = layer.key_scales[i], x = tokens.k[t * width + i];
                        const double low = type == KvType::int4 ? layer.key_minimums[i] : -127 * scale;
                        const double high = type == KvType::int4 ? low + 15 * scale : 127 * scale;
                        const double clamped = std::fmin(std::fmax(x, low), high);
                        saturated += clamped != x;
                        const double allowed = (clamped == x ? 0.5001 : 1e-6) * scale;
                        CHECK(std::fabs(held[i % head_dim] - clamped) <= allowed);
                    }
                }
                CHECK(saturated > 40 && saturated < 40 * width / 2);
            }
        }
    }
}

TEST("a key that is not finite and has no scale of its own spoils all that its readers get, and nobody else's") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (KvType type : {KvType::int8, KvType::int4}) {
            const AttentionShape shape{.kind = {type, true}, .group = 1, .head_dim = 24};
            AttentionTokens tokens(shape, 20, 1);
            const int width = shape.kv_heads * shape.head_dim;
            tokens.k[10 * width + 5] = NAN;
            AttentionWorld world(shape, set);
            world.add(tokens);
            const std::vector<float> got = world.step({{0, 0, 20}});
            for (int t = 0; t < 20; ++t) {
                for (int i = 0; i < width; ++i) {
                    CHECK(std::isnan(got[t * width + i]) == (t >= 10 && i < shape.head_dim));
                }
            }
        }
    }
}

TEST("attention_store: bfloat16 rounds ties to even and keeps NaN") {
    const AttentionShape shape{.kind = {KvType::bfloat16, false}, .kv_heads = 1, .head_dim = 8};
    AttentionTokens tokens(shape, 1, 1);
    const std::uint32_t bits[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff,
                                  0x7f7fffff, 0x80000001, 0x7fffffff, 0xff800001};
    const std::uint32_t want[] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x7f80, 0x8000, 0x7fff, 0xffc0};
    for (int d = 0; d < 8; ++d) tokens.v[d] = of_bits(bits[d]);
    for (InstructionSet set : supported_instruction_sets()) {
        AttentionWorld world(shape, set);
        world.add(tokens);
        world.step({{0, 0, 1}});
        const std::vector<double> held = reference::cached_value(world.layer(), world.slot(0, 0), 0);
        for (int d = 0; d < 8; ++d) {
            const float expected = of_bits(want[d] << 16);
            CHECK(std::isnan(expected) ? std::isnan(held[d]) : held[d] == expected);
        }
    }
}

TEST("what is not finite stays visible to those who see it, and to nobody else") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            for (int group : {1, 3}) {
                for (float poison : {NAN, INFINITY, -INFINITY}) {
                    const AttentionShape shape{.kind = kind, .group = group, .window = 50};
                    AttentionTokens tokens(shape, 150, 1);
                    AttentionWorld clean(shape, set), poisoned(shape, set);
                    clean.add(tokens);
                    const std::size_t at = static_cast<std::size_t>(70 * shape.kv_heads * shape.head_dim);
                    tokens.k[at + 5] = tokens.v[at + 5] = poison;
                    poisoned.add(tokens);
                    const std::vector<float> want = clean.step({{0, 0, 150}}), got = poisoned.step({{0, 0, 150}});
                    const std::size_t width = static_cast<std::size_t>(shape.kv_heads * group * shape.head_dim);
                    const auto equal = [&](std::size_t from, std::size_t to) {
                        return std::memcmp(&want[from * width], &got[from * width], (to - from) * width * 4) == 0;
                    };
                    CHECK_MESSAGE(equal(0, 70) && equal(120, 150), shape.name());
                    for (std::size_t t = 70; t < 120; ++t) CHECK(!std::isfinite(got[t * width + 5]));
                }
            }
        }
    }
}
