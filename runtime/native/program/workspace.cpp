#include "program/workspace.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace optimc {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

void FreeAligned::operator()(std::byte* memory) const { munmap(memory, length); }

AlignedBytes allocate_aligned(std::int64_t bytes, Pages pages) {
    const auto wanted = static_cast<std::size_t>(aligned(std::max<std::int64_t>(bytes, 1)));
    const bool is_huge = pages == Pages::huge && wanted >= 2 * kHugePage;
    const std::size_t unit = is_huge ? kHugePage : kPage;
    const std::size_t length = (wanted + unit - 1) / unit * unit;
    // Mappings start on a small page: one huge page more, and what is before and behind is given back.
    const std::size_t mapped = is_huge ? length + kHugePage : length;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    auto* start = static_cast<std::byte*>(memory);
    if (is_huge) {
        const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(memory) % kHugePage) % kHugePage;
        if (before != 0) munmap(start, before);
        start += before;
        munmap(start + length, kHugePage - before);
        madvise(start, length, MADV_HUGEPAGE);  // where the system has none, small pages do
    }
    return AlignedBytes(start, FreeAligned{length});
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
    // Buffers lie as far apart as the largest step needs, and most steps use a few rows of each: huge pages would make
    // eight megabytes resident for a step that needs one, and gain a prompt a hundredth of its time.
    arena_ = allocate_aligned(arena_bytes, Pages::small);
    private_ = allocate_aligned(private_bytes_ * threads, Pages::small);
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
