// Errors across a C ABI.
#pragma once

#include <exception>
#include <string>

namespace redraft {

// Null, or the message of what `run` throws, valid until the thread's next call.
template <class F>
const char* guarded(F run) {
    static thread_local std::string message;
    try {
        run();
        return nullptr;
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
}

}  // namespace redraft
