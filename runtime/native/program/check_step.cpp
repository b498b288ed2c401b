#include "program/check_step.h"

#include <string>

#include "require.h"

namespace optimc {

namespace {

bool in_range(std::int64_t value, std::int64_t limit) { return value >= 0 && value < limit; }

// Messages are put together when something is refused: this runs once per token.
void check_tokens(const Step& step, const StepLimits& limits) {
    const StepLayout& layout = step.layout;
    const std::int64_t slots = limits.num_blocks * limits.block_size;
    for (std::int64_t t = 0; t < layout.num_tokens; ++t) {
        if (!in_range(step.tokens[t], limits.vocabulary)) {
            refuse("token id " + std::to_string(step.tokens[t]) + " is not in the vocabulary");
        }
        if (!in_range(layout.slots[t], slots)) {
            refuse("slot " + std::to_string(layout.slots[t]) + " is not in the pool");
        }
        if (layout.positions[t] < 0) refuse("a negative position");
    }
}

void check_sequence(const StepLayout& layout, std::int64_t sequence, const StepLimits& limits) {
    const std::int64_t queries = std::int64_t{layout.query_start[sequence + 1]} - layout.query_start[sequence];
    const std::int64_t context = layout.context_len[sequence];
    if (queries <= 0) refuse("sequence " + std::to_string(sequence) + " has no tokens");
    if (context < 0) refuse("sequence " + std::to_string(sequence) + " has a context of " + std::to_string(context));
    const std::int64_t blocks = (context + queries + limits.block_size - 1) / limits.block_size;
    if (blocks > layout.table_width) {
        refuse("block_table has too few columns for sequence " + std::to_string(sequence));
    }
    if (layout.tree_mask != nullptr && queries > layout.mask_width) refuse("tree_mask has too few columns");
    const std::int32_t* table = layout.block_table + sequence * layout.table_width;
    for (std::int64_t i = 0; i < blocks; ++i) {
        if (!in_range(table[i], limits.num_blocks)) refuse("block " + std::to_string(table[i]) + " is not in the pool");
    }
}

}  // namespace

void check_step(const Step& step, const StepLimits& limits) {
    const StepLayout& layout = step.layout;
    require(layout.num_tokens > 0, "a step without tokens");
    require(layout.num_tokens <= limits.capacity, std::to_string(layout.num_tokens) + " tokens exceed the program's " +
                                                      std::to_string(limits.capacity));
    check_tokens(step, limits);
    require(layout.query_start[0] == 0 && layout.query_start[layout.num_sequences] == layout.num_tokens,
            "query_start must go from 0 to the number of tokens");
    for (std::int64_t sequence = 0; sequence < layout.num_sequences; ++sequence) {
        check_sequence(layout, sequence, limits);
    }
    for (std::int64_t r = 0; r < step.num_logits; ++r) {
        if (!in_range(step.logits_rows[r], layout.num_tokens)) refuse("a logits row is not in the step");
    }
}

}  // namespace optimc
