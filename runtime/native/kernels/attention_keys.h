// Which keys a query of this step sees, and where they lie.
//
// A query sees a list of keys: its sequence's context, then of this step's tokens those its mask allows, in order. A
// key's index in that list is what chunks and splits count. For a causal query and for a tree node, whose ancestors
// are its mask, the index is the key's position, so both get the bits that decoding one token after another would
// give.
#pragma once

#include "kernels/attention.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

// One sequence of the step.
struct StepSequence {
    const std::int64_t* positions;  // [queries]
    const std::int64_t* slots;      // [queries]
    const std::int32_t* blocks;
    const std::uint8_t* mask;  // [queries, mask_width], or nullptr for causal
    std::int64_t mask_width;
    int queries;
    int context;
};

inline StepSequence step_sequence(const StepLayout& step, std::int64_t sequence) {
    const std::int64_t first = step.query_start[sequence];
    return {step.positions + first,
            step.slots + first,
            step.block_table + sequence * step.table_width,
            step.tree_mask == nullptr ? nullptr : step.tree_mask + first * step.mask_width,
            step.mask_width,
            static_cast<int>(step.query_start[sequence + 1] - first),
            step.context_len[sequence]};
}

// Whether a query sees all of the context and of this step's tokens those up to itself, lying where the block table
// says.
inline bool is_causal(const StepSequence& s, int query, int block_size) {
    if (s.mask == nullptr) return true;
    const std::uint8_t* mask = s.mask + query * s.mask_width;
    bool same = true;
    for (int j = 0; j < s.queries; ++j) same &= (mask[j] != 0) == (j <= query);
    for (int j = 0; same && j <= query; ++j) {
        const int index = s.context + j;
        same = s.slots[j] == static_cast<std::int64_t>(s.blocks[index / block_size]) * block_size + index % block_size;
    }
    return same;
}

// Keys [begin, end) of a query's list are in its window.
struct VisibleKeys {
    int begin;
    int end;
    bool causal;
};

inline VisibleKeys visible_keys(const StepSequence& s, int query, std::int64_t window, int block_size) {
    if (is_causal(s, query, block_size)) {
        const int end = s.context + query + 1;
        return {window > 0 && window < end ? end - static_cast<int>(window) : 0, end, true};
    }
    // Positions rise along the list, so the window leaves out a number of leading keys.
    const std::int64_t oldest = window > 0 ? s.positions[query] - window + 1 : 0;
    const std::uint8_t* mask = s.mask + query * s.mask_width;
    VisibleKeys keys{oldest < 0 ? 0 : oldest < s.context ? static_cast<int>(oldest) : s.context, s.context, false};
    for (int j = 0; j < s.queries; ++j) {
        if (mask[j] == 0) continue;
        ++keys.end;
        if (s.positions[j] < oldest) keys.begin = keys.end;
    }
    return keys;
}

// Where the keys of a list lie, in order from an index on. The caller stops at the list's end.
struct KeyWalk {
    const StepSequence& s;
    const std::uint8_t* mask;  // of a query that is not causal, else nullptr
    int block_size;
    std::int64_t block;  // of the current key
    int offset;
    int index;
    int step_token;

    KeyWalk(const StepSequence& sequence, int query, bool causal, int slots, int from)
        : s(sequence), mask(causal ? nullptr : sequence.mask + query * sequence.mask_width), block_size(slots),
          block(0), offset(0), index(from), step_token(-1) {
        if (mask == nullptr || from < s.context) {
            block = s.blocks[from / block_size];
            offset = from % block_size;
        } else {
            for (int skip = s.context; skip <= from; ++skip) next_step_token();
        }
    }

    void next_step_token() {
        do ++step_token;
        while (mask[step_token] == 0);
        block = s.slots[step_token] / block_size;
        offset = static_cast<int>(s.slots[step_token] % block_size);
    }

    void next() {
        ++index;
        if (mask != nullptr && index >= s.context) return next_step_token();
        if (++offset == block_size) {
            offset = 0;
            block = s.blocks[index / block_size];
        }
    }
};

}  // namespace optimc::OPTIMC_ISA
