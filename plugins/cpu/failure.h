// The last error of an operator inside a network. OpenVINO with one thread loses it, and the outputs may hold anything.
#pragma once

#include <string>

namespace redraft {

void note_failure(const std::string& message);
// The last message that was noted since the call before; empty: none.
std::string take_failure();

}  // namespace redraft
