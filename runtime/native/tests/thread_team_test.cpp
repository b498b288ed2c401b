#include "threads/thread_team.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/check.h"

using optimc::ThreadTeam;

namespace {

struct Sum {
    ThreadTeam* team;
    std::vector<long> parts;
    int rounds;
    bool ordered = true;
};

// Each round every thread writes its part, waits, and reads all parts.
void add_up(void* argument, int thread) {
    Sum& sum = *static_cast<Sum*>(argument);
    for (int round = 1; round <= sum.rounds; ++round) {
        sum.parts[static_cast<std::size_t>(thread)] = round;
        sum.team->barrier();
        for (long part : sum.parts)
            if (part != round) sum.ordered = false;
        sum.team->barrier();
    }
}

void mark(void* argument, int thread) {
    static_cast<std::vector<std::atomic<int>>*>(argument)->at(static_cast<std::size_t>(thread)).fetch_add(1);
}

}  // namespace

TEST("a barrier shows every thread what the others wrote before it") {
    for (int threads : {1, 2, 3, 5}) {
        ThreadTeam team(threads);
        Sum sum{&team, std::vector<long>(static_cast<std::size_t>(threads)), 200};
        team.run(add_up, &sum);
        CHECK(sum.ordered);
        CHECK(sum.parts.back() == 200);
    }
}

TEST("run calls every thread once, whether the others spin, yield or sleep") {
    ThreadTeam team(3);
    std::vector<std::atomic<int>> calls(3);
    for (int pause_us : {0, 0, 100, 5000, 20000, 0}) {
        std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
        team.run(mark, &calls);
    }
    for (const auto& count : calls) CHECK(count.load() == 6);
}

// It would take some forty times as long if threads that wait for each other kept yielding to those that never wait.
TEST("a team gets on beside threads that use up the cores") {
    std::atomic<bool> done{false};
    std::vector<std::thread> others;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
        others.emplace_back([&done] {
            while (!done.load(std::memory_order_relaxed)) {
            }
        });
    }
    ThreadTeam team(2);
    Sum sum{&team, std::vector<long>(2), 5000};
    team.run(add_up, &sum);
    done = true;
    for (std::thread& other : others) other.join();
    CHECK(sum.ordered);
}

TEST("a team that never ran, and one whose workers sleep, end") {
    { ThreadTeam team(4); }
    ThreadTeam team(4);
    std::vector<std::atomic<int>> calls(4);
    team.run(mark, &calls);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(calls[3].load() == 1);
}
