// A few threads that walk through the phases of a step together.
//
// The caller is one of them. Work inside a phase is taken from a shared counter, so a disturbed thread delays nobody by
// more than one item; between phases all meet at a barrier. Waiting spins shortly, then yields, and between steps
// sleeps: a machine with more threads than cores still makes progress.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

static inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this] { serve(); });
    }
    ~Team() {
        stopping_ = true;
        calls_.fetch_add(1);
        calls_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    int size() const { return size_; }

    // Every thread runs `work` once; returns when all are done.
    void run(const std::function<void()>& work) {
        work_ = &work;
        items_.store(0);
        calls_.fetch_add(1);
        calls_.notify_all();
        work();
        meet();
    }

    // Within `run`: call `body(item)` for every item of 0 … count - 1, once over all threads; then all meet.
    template <class Body> void share(int count, const Body& body) {
        for (int item; (item = items_.fetch_add(1, std::memory_order_relaxed)) < count;) body(item);
        meet();
    }

  private:
    // The last to arrive resets the counter of items; nobody takes one before it has.
    void meet() {
        const unsigned round = rounds_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            items_.store(0, std::memory_order_relaxed);
            rounds_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; rounds_.load(std::memory_order_acquire) == round; spins++) {
            if (spins < SPINS) pause_cpu();
            else std::this_thread::yield();
        }
    }

    void serve() {
        for (unsigned seen = 0;;) {
            for (int spins = 0; spins < SPINS && calls_.load(std::memory_order_acquire) == seen; spins++) pause_cpu();
            calls_.wait(seen, std::memory_order_acquire);
            seen++;
            if (stopping_) return;
            (*work_)();
            meet();
        }
    }

    static constexpr int SPINS = 2000;
    const int size_;
    std::vector<std::thread> threads_;
    const std::function<void()>* work_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<unsigned> calls_{0};
    alignas(64) std::atomic<int> items_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> rounds_{0};
};
