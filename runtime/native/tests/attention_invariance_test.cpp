// For a token attention gives the same bits however its step is composed and shared out.
#include <cstring>

#include "kernels/attention_units.h"
#include "tests/attention_world.h"
#include "tests/check.h"

using namespace optimc;
using namespace optimc::test;

namespace {

void for_shapes(const std::function<void(const AttentionShape&, InstructionSet)>& run) {
    for (InstructionSet set : supported_instruction_sets()) {
        for (const KvKind& kind : kKvKinds) {
            run({.kind = kind, .group = 3, .rotary_dim = 64}, set);
            run({.kind = kind, .block_size = 48, .kv_heads = 1, .group = 8, .head_dim = 24, .window = 150}, set);
            run({.kind = kind, .block_size = 4, .group = 1, .head_dim = 40, .window = 33, .softcap = 4}, set);
        }
    }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void append(std::vector<float>& all, const std::vector<float>& more) {
    all.insert(all.end(), more.begin(), more.end());
}

std::vector<float> rows(const std::vector<float>& out, const AttentionShape& shape, int begin, int end) {
    const int width = shape.kv_heads * shape.group * shape.head_dim;
    return {out.begin() + begin * width, out.begin() + end * width};
}

}  // namespace

TEST("one prefill, chunks of any size and token by token give the same bits") {
    constexpr int tokens = 330;
    for_shapes([&](const AttentionShape& shape, InstructionSet set) {
        const AttentionTokens data(shape, tokens, 1);
        AttentionWorld whole(shape, set);
        whole.add(data);
        const std::vector<float> want = whole.step({{0, 0, tokens}});
        for (int chunk : {1, 3, 7, 16, 64, 100, 257}) {
            AttentionWorld world(shape, set);
            world.add(data);
            std::vector<float> got;
            for (int at = 0; at < tokens; at += chunk) append(got, world.step({{0, at, std::min(tokens, at + chunk)}}));
            CHECK_MESSAGE(same_bits(got, want), shape.name() + " chunk " + std::to_string(chunk));
        }
    });
}

TEST("alone and in a batch give the same bits") {
    for_shapes([](const AttentionShape& shape, InstructionSet set) {
        const int lengths[] = {300, 65, 1, 129, 40}, contexts[] = {299, 60, 0, 64, 0};
        std::vector<float> alone;
        for (int b = 0; b < 5; ++b) {
            AttentionWorld world(shape, set);
            world.add({shape, lengths[b], static_cast<unsigned>(b)});
            if (contexts[b] > 0) world.step({{0, 0, contexts[b]}});
            append(alone, world.step({{0, contexts[b], lengths[b]}}));
        }
        AttentionWorld world(shape, set);
        std::vector<AttentionPart> fill, batch;
        for (int b = 0; b < 5; ++b) {
            world.add({shape, lengths[b], static_cast<unsigned>(b)});
            if (contexts[b] > 0) fill.push_back({b, 0, contexts[b]});
            batch.push_back({b, contexts[b], lengths[b]});
        }
        world.step(fill);
        CHECK_MESSAGE(same_bits(world.step(batch), alone), shape.name());
    });
}

TEST("any cut into items gives the same bits") {
    constexpr int context = 1100, tokens = 1109;
    for_shapes([&](const AttentionShape& shape, InstructionSet set) {
        AttentionWorld world(shape, set);
        world.add({shape, tokens, 1});
        world.step({{0, 0, context}});
        constexpr std::int32_t queries = tokens - context, splits = (tokens + kSplitKeys - 1) / kSplitKeys;
        const auto cut = [&](std::int32_t block, std::int32_t part) {
            return world.step_with({{0, context, tokens}}, [&](const StepLayout&) {
                std::vector<std::vector<AttentionItem>> lists;
                for (int head = 0; head < shape.kv_heads; ++head) {
                    for (std::int32_t q = 0; q < queries; q += block) {
                        lists.emplace_back();
                        for (std::int32_t s = 0; s < splits; s += part) {
                            lists.back().push_back(
                                {0, head, q, std::min(queries, q + block), s, std::min(splits, s + part), -1});
                        }
                    }
                }
                return lists;
            });
        };
        const std::vector<float> want = cut(queries, splits);
        for (std::int32_t block : {1, 2, 4, 9}) {
            for (std::int32_t part : {1, 2, 3, 5}) {
                CHECK_MESSAGE(same_bits(cut(block, part), want),
                              shape.name() + " queries " + std::to_string(block) + " splits " + std::to_string(part));
            }
        }
    });
}

TEST("any number of threads, any order of items and whatever unused slots hold give the same bits") {
    for_shapes([](const AttentionShape& shape, InstructionSet set) {
        const std::vector<AttentionPart> parts{{0, 800, 801}, {1, 20, 60}, {2, 0, 100}};
        const auto run = [&](int threads, bool last_first, std::uint8_t garbage) {
            AttentionWorld world(shape, set, garbage);
            world.add({shape, 801, 1});
            world.add({shape, 60, 2});
            world.add({shape, 100, 3});
            world.step({{0, 0, 800}, {1, 0, 20}});
            world.last_first = last_first;
            return world.step(parts, threads);
        };
        const std::vector<float> want = run(1, false, 0xff);
        for (int threads : {2, 3, 64}) {
            CHECK_MESSAGE(same_bits(run(threads, threads == 3, 0xff), want), shape.name());
        }
        for (std::uint8_t garbage : {0x00, 0x7f}) {
            CHECK_MESSAGE(same_bits(run(2, true, garbage), want), shape.name());
        }
    });
}

TEST("a token verified in a tree gets the bits of decoding its branch token by token") {
    // 60 and 250: the branch crosses the end of a chunk and of a split.
    for (int context : {0, 60, 250}) {
        for_shapes([&](const AttentionShape& shape, InstructionSet set) {
            const std::vector<int> parents{-1, 0, 0, 1, 1, 2, 3, 6, 7, 8, 4, 9, -1};
            const int nodes = static_cast<int>(parents.size());
            const AttentionTokens data(shape, context + nodes, 1);
            for (bool backwards : {false, true}) {
                AttentionWorld world(shape, set);
                world.backwards = backwards;
                world.add(data);
                world.add({shape, 90, 2});
                if (context > 0) world.step({{0, 0, context}});
                // A prompt beside it turns the step's causal rows into rows of a mask, too.
                const std::vector<float> got = world.step({{0, context, context + nodes, parents}, {1, 0, 90}}, 2);
                for (int node = 0; node < nodes; ++node) {
                    std::vector<int> branch;
                    for (int at = node; at >= 0; at = parents[at]) branch.insert(branch.begin(), at);
                    AttentionTokens line;
                    for (int t = 0; t < context; ++t) line.append(shape, data, t);
                    for (int at : branch) line.append(shape, data, context + at);
                    AttentionWorld decoder(shape, set);
                    decoder.add(line);
                    if (context > 0) decoder.step({{0, 0, context}});
                    std::vector<float> want;
                    for (int t = context; t < context + static_cast<int>(branch.size()); ++t) {
                        want = decoder.step({{0, t, t + 1}});
                    }
                    const std::string where = " context " + std::to_string(context) + " node " + std::to_string(node);
                    CHECK_MESSAGE(same_bits(rows(got, shape, node, node + 1), want), shape.name() + where);
                }
                AttentionWorld prompt(shape, set);
                prompt.add({shape, 90, 2});
                CHECK_MESSAGE(same_bits(rows(got, shape, nodes, nodes + 90), prompt.step({{0, 0, 90}})), shape.name());
            }
        });
    }
}
