// Attend to the cache: one piece of a step's attention.
#include "kernels/attention_softmax.h"
#include "kernels/declarations.h"

namespace optimc::OPTIMC_ISA {

namespace {

// From this many rows on, copying a chunk once, widened or in cells, beats loading it so in every tile.
constexpr int kCopyRows = 3 * kTileRows;

void attend_rows_to_chunk(const AttentionCall& call, const Chunk& chunk, const QueryRows& rows, int first, int last) {
    const auto attend = [&]<KvType type>() {
        chunk.copied ? attend_chunk<type, true>(call, chunk, rows, first, last)
                     : attend_chunk<type, false>(call, chunk, rows, first, last);
    };
    switch (call.cache.type) {
        // A copy differs from the cache in where rows lie alone, which the chunk says.
        case KvType::float32: return attend_chunk<KvType::float32, false>(call, chunk, rows, first, last);
        case KvType::bfloat16: return attend.template operator()<KvType::bfloat16>();
        case KvType::int8: return attend.template operator()<KvType::int8>();
        case KvType::int4: return attend.template operator()<KvType::int4>();
    }
}

// Some rows of an item: row `r` of the block is row `first + r` of the item.
struct RowBlock {
    const AttentionCall& call;
    const AttentionItem& item;
    const StepSequence sequence;
    const CacheHead cache;
    const int group;
    const std::int64_t first;
    QueryRows rows;
    Chunk* chunks;  // the current one and the next
    bool causal = true;  // all of them

    int query_of(int r) const { return item.query_begin + static_cast<int>((first + r) / group); }
    int head_of(int r) const { return item.kv_head * group + static_cast<int>((first + r) % group); }
    std::int64_t token_of(int r) const { return call.step->query_start[item.sequence] + query_of(r); }

    void load_rows() {
        for (int r = 0; r < rows.count; ++r) {
            load_query(call, token_of(r), head_of(r), r, rows);
            if (r > 0 && query_of(r) == query_of(r - 1)) {
                rows.begin[r] = rows.begin[r - 1];
                rows.end[r] = rows.end[r - 1];
                continue;
            }
            const VisibleKeys keys = visible_keys(sequence, query_of(r), call.spec.window, call.cache.block_size);
            rows.begin[r] = keys.begin;
            rows.end[r] = keys.end;
            causal &= keys.causal;
        }
    }

    bool read(int chunk_first, int from, int to, bool shared, Chunk& chunk) const {
        const ChunkKeys any = keys_of_any(rows, from, to, chunk_first);
        if (any.none()) return false;
        read_chunk(cache, sequence, query_of(from), shared, chunk_first, any.begin, any.end, to - from >= kCopyRows,
                   rows.copy, chunk);
        return true;
    }

    // Whether all rows see the same keys in this chunk, as far as they see it.
    bool is_shared(int chunk_first) const { return causal || chunk_first + kChunkKeys <= sequence.context; }

    void attend(int chunk_first) {
        if (!is_shared(chunk_first)) {
            for (int from = 0, to; from < rows.count; from = to) {
                for (to = from + 1; to < rows.count && query_of(to) == query_of(from);) ++to;
                if (read(chunk_first, from, to, false, chunks[0])) {
                    attend_rows_to_chunk(call, chunks[0], rows, from, to);
                }
            }
            return;
        }
        Chunk& chunk = chunks[chunk_first / kChunkKeys % 2];
        if (chunk.first != chunk_first && !read(chunk_first, 0, rows.count, true, chunk)) return;
        // What is used where it lies is found one chunk ahead, so that it is fetched meanwhile.
        const int next_first = chunk_first + kChunkKeys;
        if (reads_in_place(cache.layer, rows.count >= kCopyRows) && is_shared(next_first) &&
            next_first < item.split_end * kSplitKeys) {
            read(next_first, 0, rows.count, true, chunks[next_first / kChunkKeys % 2]);
        }
        attend_rows_to_chunk(call, chunk, rows, 0, rows.count);
    }

    void attend_split(int split_first) {
        clear_split(rows);
        for (int at = split_first; at < split_first + kSplitKeys; at += kChunkKeys) attend(at);
    }

    void run(float* partials) {
        load_rows();
        const int width = rows.width;
        const bool has_minimums = kv_has_minimums(call.cache.type);
        const std::int64_t unit = attention_partial_floats(call.spec.head_dim);
        const std::int64_t splits = item.split_end - item.split_begin;
        const auto all = [&](int r) {
            return RowState{rows.all_values + r * width, rows.all_largest + r, rows.all_sums + r};
        };
        if (item.partial < 0) {
            for (int r = 0; r < rows.count; ++r) clear_row(all(r), width);
        }
        for (int split = item.split_begin; split < item.split_end; ++split) {
            attend_split(split * kSplitKeys);
            for (int r = 0; r < rows.count; ++r) {
                float weight_sum;
                const RowState state = end_split(rows, r, has_minimums, &weight_sum);
                if (item.partial < 0) {
                    merge_split(all(r), state.values, *state.largest, *state.sum, width);
                    continue;
                }
                float* partial =
                    partials + (item.partial + (first + r) * splits + (split - item.split_begin)) * unit;
                for (int d = 0; d < width; d += kLanes) store(partial + d, load(state.values + d));
                partial[width] = *state.largest;
                partial[width + 1] = *state.sum;
            }
        }
        if (item.partial >= 0) return;
        for (int r = 0; r < rows.count; ++r) {
            float* out = call.out.data + token_of(r) * call.out.stride + head_of(r) * call.spec.head_dim;
            finish_row(all(r), out, call.spec.head_dim);
        }
    }
};

}  // namespace

void attention_item(const AttentionCall& call, const AttentionItem& item, float* partials, std::byte* scratch) {
    const int group = call.spec.num_heads / call.spec.num_kv_heads;
    const std::int64_t rows = static_cast<std::int64_t>(item.query_end - item.query_begin) * group;
    Chunk chunks[2];
    for (std::int64_t first = 0; first < rows; first += kBlockRows) {
        chunks[0].first = chunks[1].first = -1;
        RowBlock block{call,
                       item,
                       step_sequence(*call.step, item.sequence),
                       {call.cache, kv_parts(call.cache), item.kv_head},
                       group,
                       first,
                       {},
                       chunks};
        place_rows(call.spec.head_dim, scratch, block.rows);
        block.rows.count = static_cast<int>(rows - first < kBlockRows ? rows - first : kBlockRows);
        block.run(partials);
    }
}

std::size_t attention_scratch(const AttentionSpec& spec) {
    QueryRows rows;
    return place_rows(spec.head_dim, nullptr, rows);
}

}  // namespace optimc::OPTIMC_ISA
