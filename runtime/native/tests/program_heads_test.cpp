// Heads in a program: a second list of operations on the same memory and threads, beside steps that stay as they are.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/select.h"
#include "program/builder.h"
#include "tests/check.h"
#include "tests/float_weight.h"

namespace optimc::test {

namespace {

constexpr std::int64_t kVocab = 11, kWidth = 8, kHeads = 2, kCapacity = 12, kPool = 4;

// One attention layer over embeddings, a head; two conditioned heads of one block that share it.
class World {
  public:
    World() : head_(FloatType::float32, kVocab, kWidth, 1), block_(FloatType::float32, kHeads * kWidth, 2 * kWidth, 2) {
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (float& x : table_) x = normal(random);
        for (std::size_t i = 0; i < kHeads * kWidth; ++i) bias_[i] = normal(random);
    }

    std::unique_ptr<Program> build(int threads, bool answers_hidden = true) {
        Builder builder = start();
        begin(builder);
        add_heads(builder);
        const std::optional<View> hidden = answers_hidden ? std::optional<View>({wanted_, 0, kWidth}) : std::nullopt;
        return builder.finish(logits_, hidden, kernels_of(choose_instruction_set()), threads);
    }

    Builder start() {
        Builder builder({{1, kWidth, KvType::float32, false}}, kPool, kPool, kCapacity, 1 << 16);
        offset_ = 0;
        const int table = builder.add_table({table_.data(), FloatType::float32, kVocab, kWidth}, kVocab * kWidth * 4);
        const int head = builder.add_float_weight(head_.get(), 32 * kWidth * 4);
        const int block = builder.add_float_weight(block_.get(), 32 * 2 * kWidth * 4);
        const int bias = builder.add_vector({bias_.data(), 32});
        names_ = {table, head, block, bias};
        const int stream = add(builder, RowsKind::tokens, kWidth);
        mixed_ = add(builder, RowsKind::tokens, kWidth);
        wanted_ = add(builder, RowsKind::logits, kWidth);
        logits_ = add(builder, RowsKind::logits, kVocab);
        input_ = add(builder, RowsKind::tokens, (kHeads + 1) * kWidth);
        pre_ = add(builder, RowsKind::tokens, kHeads * kWidth);
        const std::int64_t at = offset_;
        state_ = add(builder, RowsKind::tokens, kHeads * kWidth);
        rows_ = builder.add_float_buffer(RowsKind::logits, kWidth, at);  // the same bytes, a head a row
        answers_ = add(builder, RowsKind::logits, kVocab);
        const View all = {stream, 0, kWidth};
        builder.embed(table, 1.0f, all);
        builder.attention({{.num_heads = 1,
                            .num_kv_heads = 1,
                            .head_dim = kWidth,
                            .scale = 0.3f,
                            .softcap = 0,
                            .window = 0,
                            .rotary_dim = 0,
                            .interleaved = false},
                           0,
                           false},
                          all, all, all, std::nullopt, {mixed_, 0, kWidth});
        builder.gather_rows({mixed_, 0, kWidth}, {wanted_, 0, kWidth});
        builder.linear(View{wanted_, 0, kWidth}, head, std::nullopt, std::nullopt, Gate::none, {logits_, 0, kVocab});
        return builder;
    }

    void begin(Builder& builder) const {
        builder.begin_heads({{input_, 0, kWidth}, {input_, kWidth, kWidth}}, answers_, kHeads);
    }

    void add_heads(Builder& builder) const {
        const auto [table, head, block, bias] = names_;
        const View given = {input_, 0, kHeads * kWidth}, pre = {pre_, 0, kHeads * kWidth};
        builder.embed(table, 1.0f, {input_, kHeads * kWidth, kWidth});
        builder.linear(View{input_, (kHeads - 1) * kWidth, 2 * kWidth}, block, bias, std::nullopt, Gate::none, pre);
        builder.elementwise({{ElementwiseOp::rows, 0, 0, 0},
                             {ElementwiseOp::rows, 1, 0, 0},
                             {ElementwiseOp::silu, 1, 0, 0},
                             {ElementwiseOp::add, 0, 2, 0}},
                            {given, pre}, {}, {state_, 0, kHeads * kWidth});
        builder.linear(View{rows_, 0, kWidth}, head, std::nullopt, std::nullopt, Gate::none, {answers_, 0, kVocab});
    }

    // Logits [rows * K, V] of the heads.
    std::vector<float> expected(const std::vector<float>& hidden, const std::vector<std::int64_t>& tokens) const {
        std::vector<float> logits;
        for (std::size_t n = 0; n < tokens.size(); ++n) {
            for (std::int64_t k = 0; k < kHeads; ++k) {
                std::vector<double> x(kWidth);
                for (std::int64_t i = 0; i < kWidth; ++i) {
                    double sum = bias_[static_cast<std::size_t>(k * kWidth + i)];
                    for (std::int64_t c = 0; c < 2 * kWidth; ++c) {
                        const float read = c < kWidth ? at(hidden, static_cast<std::int64_t>(n) * kWidth + c)
                                                      : at(table_, tokens[n] * kWidth + c - kWidth);
                        sum += static_cast<double>(element(block_.get(), k * kWidth + i, c)) * read;
                    }
                    const double silu = sum / (1 + std::exp(-sum));
                    x[static_cast<std::size_t>(i)] = at(hidden, static_cast<std::int64_t>(n) * kWidth + i) + silu;
                }
                for (std::int64_t v = 0; v < kVocab; ++v) {
                    double sum = 0;
                    for (std::int64_t c = 0; c < kWidth; ++c) {
                        sum += element(head_.get(), v, c) * x[static_cast<std::size_t>(c)];
                    }
                    logits.push_back(static_cast<float>(sum));
                }
            }
        }
        return logits;
    }

    // Buffers; `start` numbers them.
    int mixed_ = 0, wanted_ = 0, logits_ = 0, input_ = 0, pre_ = 0, state_ = 0, rows_ = 0, answers_ = 0;

  private:
    struct Names {
        int table, head, block, bias;
    };

    int add(Builder& builder, RowsKind rows, std::int64_t width) {
        const int index = builder.add_float_buffer(rows, width, offset_);
        offset_ += aligned(kCapacity * width * 4);
        return index;
    }

    static float at(const std::vector<float>& values, std::int64_t index) {
        return values[static_cast<std::size_t>(index)];
    }

    static float element(const FloatWeight& weight, std::int64_t output, std::int64_t feature) {
        const auto* data = static_cast<const float*>(weight.data);
        return data[(output / kPanelRows * weight.features + feature) * kPanelRows + output % kPanelRows];
    }

    TestFloatWeight head_, block_;
    std::vector<float> table_ = std::vector<float>(kVocab * kWidth);
    std::vector<float> bias_ = std::vector<float>(32);
    std::int64_t offset_ = 0;
    Names names_{};
};

std::vector<float> some_hidden(std::int64_t rows) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> hidden(static_cast<std::size_t>(rows * kWidth));
    for (float& x : hidden) x = normal(random);
    return hidden;
}

std::vector<float> copied(ConstRows rows, std::int64_t count) {
    return {rows.data, rows.data + count * rows.stride};
}

template <typename F>
std::string refusal(F attempt) {
    try {
        attempt();
    } catch (const std::invalid_argument& reason) {
        return reason.what();
    }
    return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST("heads compute their blocks and the projection they share, row by row") {
    World world;
    for (int threads : {1, 3}) {
        const std::unique_ptr<Program> program = world.build(threads);
        std::vector<float> first;
        for (std::int64_t rows : {1, 3, 6}) {
            const std::vector<float> hidden = some_hidden(rows);
            std::vector<std::int64_t> tokens;
            for (std::int64_t i = 0; i < rows; ++i) tokens.push_back((3 * i + 10) % kVocab);
            const std::vector<float> found = copied(program->draft(hidden.data(), tokens.data(), rows), rows * kHeads);
            const std::vector<float> want = world.expected(hidden, tokens);
            CHECK(found.size() == want.size());
            CHECK(relative_error(found.data(), want.data(), want.size()) < 1e-5);
            if (first.empty()) first = found;
            CHECK(std::equal(first.begin(), first.end(), found.begin()));  // bits do not depend on other rows
        }
    }
}

TEST("steps and drafts take turns on one memory") {
    World world;
    const std::unique_ptr<Program> program = world.build(2);
    const std::vector<std::int64_t> tokens = {4, 1, 9}, positions = {0, 1, 2}, slots = {0, 1, 2}, wanted = {1, 2};
    const std::vector<std::int32_t> start = {0, 3}, context = {0}, table = {0};
    Step step{};
    step.layout.num_tokens = 3;
    step.layout.num_sequences = 1;
    step.layout.positions = positions.data();
    step.layout.slots = slots.data();
    step.layout.query_start = start.data();
    step.layout.context_len = context.data();
    step.layout.block_table = table.data();
    step.layout.table_width = 1;
    step.tokens = tokens.data();
    step.logits_rows = wanted.data();
    step.num_logits = 2;
    const std::vector<float> logits = copied(program->execute(step), 2), hidden = copied(program->hidden_rows(), 2);
    const ConstRows as_it_lies = program->hidden_rows();
    const std::vector<float> drafted = copied(program->draft(as_it_lies.data, wanted.data(), 2), 2 * kHeads);
    CHECK(copied(program->hidden_rows(), 2) == hidden);
    CHECK(copied(program->execute(step), 2) == logits);
    CHECK(copied(program->draft(hidden.data(), wanted.data(), 2), 2 * kHeads) == drafted);
}

TEST("heads that do not fit are refused in words") {
    World world;
    world.build(1);
    const auto begun = [&](const std::vector<View>& inputs, int logits, std::int64_t count) {
        Builder builder = world.start();
        return refusal([&] { builder.begin_heads(inputs, logits, count); });
    };
    const View input = {world.input_, 0, kWidth};
    CHECK(begun({input}, world.answers_, 1).empty());
    CHECK(contains(begun({input}, world.answers_, 0), "0 heads in steps of at most 12 rows"));
    CHECK(contains(begun({input}, world.answers_, kCapacity + 1), "13 heads"));
    CHECK(contains(begun({}, world.answers_, 1), "0 inputs"));
    CHECK(contains(begun({input, {world.input_, 0, 4}}, world.answers_, 1), "4 columns, want 8"));
    CHECK(contains(begun({{world.wanted_, 0, kWidth}}, world.answers_, 1), "rows of another kind"));
    CHECK(contains(begun({input}, world.state_, 1), "not computed for the rows that want them"));
    CHECK(contains(begun({input}, 99, 1), "no buffer 99"));
    Builder builder = world.start();
    world.begin(builder);
    CHECK(contains(refusal([&] { world.begin(builder); }), "begun already"));
    CHECK(contains(refusal([&] { builder.gather_rows({world.mixed_, 0, kWidth}, {world.wanted_, 0, kWidth}); }),
                   "a gather of rows among the operations of heads"));
    const Kernels& kernels = kernels_of(choose_instruction_set());
    CHECK(contains(refusal([&] { builder.finish(world.logits_, std::nullopt, kernels, 1); }),
                   "heads without operations"));
    CHECK(contains(refusal([&] { world.build(1, false); }), "hidden states the program does not answer"));
    const std::unique_ptr<Program> program = world.build(1);
    const std::vector<float> hidden = some_hidden(2);
    const std::vector<std::int64_t> beyond = {1, kVocab}, negative = {-1, 1};
    CHECK(contains(refusal([&] { program->draft(hidden.data(), beyond.data(), 2); }), "token id 11 is not in the voc"));
    CHECK(contains(refusal([&] { program->draft(hidden.data(), negative.data(), 2); }), "token id -1"));
}

}  // namespace optimc::test
