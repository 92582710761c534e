// The operators as an OpenVINO extension: read from ONNX files and run by its CPU plugin.
#include "../operators/program/op.h"
#include "openvino/core/extension.hpp"
#include "openvino/core/op_extension.hpp"
#include "openvino/frontend/onnx/extension/op.hpp"

namespace {

template <class T>
void add(std::vector<ov::Extension::Ptr>& extensions) {
    const auto& info = T::get_type_info_static();
    extensions.push_back(std::make_shared<ov::OpExtension<T>>());
    extensions.push_back(std::make_shared<ov::frontend::onnx::OpExtension<T>>(info.name, info.version_id));
}

std::vector<ov::Extension::Ptr> all() {
    std::vector<ov::Extension::Ptr> extensions;
#define REDRAFT_ADD(Name) add<redraft::Name>(extensions);
    REDRAFT_OPERATORS(REDRAFT_ADD)
    add<redraft::Program>(extensions);
    return extensions;
}

}  // namespace

OPENVINO_CREATE_EXTENSIONS(all());
