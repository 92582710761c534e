#include "failure.h"

#include <mutex>
#include <utility>

namespace redraft {
namespace {

std::mutex g_mutex;
std::string g_failure;

}  // namespace

void note_failure(const std::string& message) {
    std::lock_guard lock(g_mutex);
    g_failure = message;
}

std::string take_failure() {
    std::lock_guard lock(g_mutex);
    return std::exchange(g_failure, {});
}

}  // namespace redraft
