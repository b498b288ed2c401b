#include "program/program.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "require.h"

namespace optimc {

namespace {

using Ops = std::vector<std::unique_ptr<Op>>;

std::int64_t most_scratch(const Ops& ops, const std::optional<Heads>& heads, const Kernels& kernels) {
    std::size_t most = 0;
    for (const auto& op : ops) most = std::max(most, op->scratch_bytes(kernels));
    if (!heads) return static_cast<std::int64_t>(most);
    for (const auto& op : heads->ops) most = std::max(most, op->scratch_bytes(kernels));
    return static_cast<std::int64_t>(most);
}

struct Job {
    const Ops& ops;
    const Context& context;
};

void run_ops(void* argument, int thread) {
    const Job& job = *static_cast<const Job*>(argument);
    for (const auto& op : job.ops) {
        op->run(job.context, thread);
        if (!op->is_private(job.context)) job.context.team.barrier();
    }
}

void run_all(const Ops& ops, const Kernels& kernels, ThreadTeam& team, Workspace& workspace, const Step& step) {
    for (const auto& op : ops) op->prepare(step, workspace);
    const Context context = {kernels, team, workspace, step};
    Job job = {ops, context};
    team.run(run_ops, &job);
}

}  // namespace

Program::Program(Parts parts, std::unique_ptr<KvPool> pool, const Kernels& kernels, int threads)
    : ops_(std::move(parts.ops)),
      capacity_(parts.capacity),
      logits_(parts.logits),
      vocabulary_(parts.vocabulary),
      hidden_(parts.hidden),
      heads_(std::move(parts.heads)),
      pool_(std::move(pool)),
      kernels_(kernels),
      workspace_(std::move(parts.floats), std::move(parts.quantized), parts.capacity, parts.arena_bytes, threads,
                 most_scratch(ops_, heads_, kernels)),
      team_(threads) {}

ConstRows Program::execute(const Step& step) {
    run_all(ops_, kernels_, team_, workspace_, step);
    return workspace_.const_rows(logits_);
}

ConstRows Program::draft(const float* hidden, const std::int64_t* tokens, std::int64_t rows) {
    for (std::int64_t i = 0; i < rows; ++i) {
        if (tokens[i] < 0 || tokens[i] >= vocabulary_) {
            refuse("token id " + std::to_string(tokens[i]) + " is not in the vocabulary");
        }
    }
    for (const View& input : heads_->inputs) {
        const Rows target = workspace_.rows(input);
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(target.data + i * target.stride, hidden + i * input.width,
                        static_cast<std::size_t>(input.width) * sizeof(float));
        }
    }
    Step step{};
    step.layout.num_tokens = rows;
    step.tokens = tokens;
    step.num_logits = rows * heads_->count;
    run_all(heads_->ops, kernels_, team_, workspace_, step);
    return workspace_.const_rows(heads_->logits);
}

}  // namespace optimc
