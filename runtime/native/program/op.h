// One operation of a program, done by all threads of a team together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "program/workspace.h"
#include "threads/thread_team.h"

namespace optimc {

// One step's input, beside the layout of its sequences.
struct Step {
    StepLayout layout;
    const std::int64_t* tokens;       // [T]
    const std::int64_t* logits_rows;  // [R]
    std::int64_t num_logits;          // R

    std::int64_t rows(RowsKind kind) const { return kind == RowsKind::tokens ? layout.num_tokens : num_logits; }
};

struct Context {
    const Kernels& kernels;
    ThreadTeam& team;
    const Workspace& workspace;
    const Step& step;
};

class Op {
  public:
    virtual ~Op() = default;

    // Called once per step, by one thread, before any operation runs.
    virtual void prepare(const Step&, Workspace&) {}

    // Do `thread`'s part.
    virtual void run(const Context& context, int thread) = 0;

    // Whether each thread did everything it will read: then nobody waits for the others afterwards.
    virtual bool is_private(const Context&) const { return false; }

    // Scratch each thread needs.
    virtual std::size_t scratch_bytes(const Kernels&) const { return 0; }
};

struct Range {
    std::int64_t begin;
    std::int64_t end;
};

// The `part`-th of `parts` contiguous shares of [0, count), as even as can be.
inline Range share(std::int64_t count, int part, int parts) {
    return {count * part / parts, count * (part + 1) / parts};
}

}  // namespace optimc
