#include "program/program.h"

#include <algorithm>
#include <utility>

namespace optimc {

namespace {

std::int64_t most_scratch(const std::vector<std::unique_ptr<Op>>& ops, const Kernels& kernels) {
    std::size_t most = 0;
    for (const auto& op : ops) most = std::max(most, op->scratch_bytes(kernels));
    return static_cast<std::int64_t>(most);
}

struct Job {
    const std::vector<std::unique_ptr<Op>>& ops;
    const Context& context;
};

void run_ops(void* argument, int thread) {
    const Job& job = *static_cast<const Job*>(argument);
    for (const auto& op : job.ops) {
        op->run(job.context, thread);
        if (!op->is_private(job.context)) job.context.team.barrier();
    }
}

}  // namespace

Program::Program(Parts parts, std::unique_ptr<KvPool> pool, const Kernels& kernels, int threads)
    : ops_(std::move(parts.ops)),
      capacity_(parts.capacity),
      logits_(parts.logits),
      vocabulary_(parts.vocabulary),
      pool_(std::move(pool)),
      kernels_(kernels),
      workspace_(std::move(parts.floats), std::move(parts.quantized), parts.capacity, parts.arena_bytes, threads,
                 most_scratch(ops_, kernels)),
      team_(threads) {}

ConstRows Program::execute(const Step& step) {
    for (const auto& op : ops_) op->prepare(step, workspace_);
    const Context context = {kernels_, team_, workspace_, step};
    Job job = {ops_, context};
    team_.run(run_ops, &job);
    return workspace_.const_rows(logits_);
}

}  // namespace optimc
