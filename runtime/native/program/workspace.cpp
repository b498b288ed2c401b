#include "program/workspace.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace optimc {

namespace {

// A mapping's length is kept in front of it, in a page of its own, so that the memory proper starts on a page.
constexpr std::size_t kPage = 4096;

}  // namespace

void FreeAligned::operator()(std::byte* memory) const {
    std::byte* start = memory - kPage;
    munmap(start, *reinterpret_cast<std::size_t*>(start));
}

AlignedBytes allocate_aligned(std::int64_t bytes) {
    const std::size_t length = kPage + static_cast<std::size_t>(aligned(bytes));
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    *static_cast<std::size_t*>(memory) = length;
    return AlignedBytes(static_cast<std::byte*>(memory) + kPage);
}

QuantizedRows QuantizedBuffer::at(std::byte* base, std::int64_t capacity, int term) const {
    std::byte* scales = base + aligned(terms * capacity * padded_features());
    std::byte* sums = scales + aligned(terms * capacity * groups() * 4);
    const std::int64_t first = term * capacity;
    return {
        .codes = reinterpret_cast<std::int8_t*>(base) + first * padded_features(),
        .scales = reinterpret_cast<float*>(scales) + first * groups(),
        .sums = reinterpret_cast<std::int32_t*>(sums) + first * groups(),
        .stride = padded_features(),
        .groups = groups(),
    };
}

Workspace::Workspace(std::vector<FloatBuffer> floats, std::vector<QuantizedBuffer> quantized, std::int64_t capacity,
                     std::int64_t arena_bytes, int threads, std::int64_t scratch_bytes)
    : floats_(std::move(floats)), quantized_(std::move(quantized)), capacity_(capacity), threads_(threads) {
    for (QuantizedBuffer& buffer : quantized_) {
        if (!buffer.replicable) continue;
        buffer.replica_offset = replica_bytes_;
        replica_bytes_ += buffer.bytes(kReplicatedRows);
    }
    // Threads' private parts start on pages of their own.
    constexpr auto page = static_cast<std::int64_t>(kPage);
    private_bytes_ = (replica_bytes_ + aligned(scratch_bytes) + page - 1) / page * page;
    arena_ = allocate_aligned(arena_bytes);
    private_ = allocate_aligned(private_bytes_ * threads);
}

Rows Workspace::rows(const View& view) const {
    const FloatBuffer& owner = buffer(view);
    return {reinterpret_cast<float*>(arena_.get() + owner.offset) + view.column, owner.width};
}

ConstRows Workspace::const_rows(const View& view) const {
    const Rows writable = rows(view);
    return {writable.data, writable.stride};
}

QuantizedRows Workspace::quantized_rows(int index, std::int64_t rows, int thread, int term) const {
    const QuantizedBuffer& owner = quantized(index);
    if (is_replicated(index, rows)) {
        return owner.at(private_.get() + thread * private_bytes_ + owner.replica_offset, kReplicatedRows, term);
    }
    return owner.at(arena_.get() + owner.offset, capacity_, term);
}

void Workspace::reserve_partials(std::int64_t count) {
    if (count <= num_partials_) return;
    partials_ = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(count));
    num_partials_ = count;
}

}  // namespace optimc
