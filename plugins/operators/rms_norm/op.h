#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class RMSNorm : public Operator {
  public:
    OPENVINO_OP("RMSNorm", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        expect_type(this, 0, ov::element::f32);
        expect_type(this, 1, ov::element::f32);
        if (get_input_size() == 3) expect_type(this, 2, ov::element::f32);
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<RMSNorm>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("eps", eps_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape& shape = inputs[0].get_shape();
        outputs[0].set_shape(shape);
        OPENVINO_ASSERT(inputs[1].get_size() == shape.back(), "the norm weight has ", inputs[1].get_size(),
                        " elements: expected ", shape.back());
        const int64_t features = static_cast<int64_t>(shape.back());
        OPENVINO_ASSERT(inputs.size() < 3 || inputs[2].get_shape() == shape, "the residual has another shape than x: ",
                        inputs.back().get_shape(), ", expected ", shape);
        run_kernel(RMSNormArgs{inputs[0].data<const float>(), static_cast<int64_t>(inputs[0].get_size()) / features,
                               features, inputs[1].data<const float>(), eps_,
                               inputs.size() < 3 ? nullptr : inputs[2].data<const float>(), outputs[0].data<float>()});
    }

  private:
    float eps_ = 1e-5f;
};

}  // namespace redraft
