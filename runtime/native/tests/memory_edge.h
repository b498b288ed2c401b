// Memory whose end is the end of what may be touched: a kernel that reads or writes past it crashes.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

namespace optimc::test {

class MemoryEdge {
public:
    // Room for `bytes` before the edge.
    explicit MemoryEdge(std::size_t bytes) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        usable_ = (bytes + page - 1) / page * page;
        mapped_ = usable_ + page;
        base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(base_ + usable_, page, PROT_NONE);
    }
    ~MemoryEdge() { munmap(base_, mapped_); }
    MemoryEdge(const MemoryEdge&) = delete;
    MemoryEdge& operator=(const MemoryEdge&) = delete;

    // The last n elements.
    template <class Element>
    Element* last(std::size_t n) {
        return reinterpret_cast<Element*>(base_ + usable_) - n;
    }

    // A copy of n elements that ends at the edge.
    template <class Element>
    Element* copy(const Element* from, std::size_t n) {
        std::memcpy(last<Element>(n), from, n * sizeof(Element));
        return last<Element>(n);
    }

private:
    std::size_t usable_, mapped_;
    char* base_;
};

}  // namespace optimc::test
