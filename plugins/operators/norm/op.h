#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class Norm : public Operator {
  public:
    OPENVINO_OP("Norm", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        optional_ = OptionalInputs(inputs_, 2);
        OPENVINO_ASSERT(get_input_size() == optional_.end(), get_friendly_name(), " has ", get_input_size(),
                        " inputs: attribute inputs='", inputs_, "' says ", optional_.end());
        for (std::size_t i = 0; i < get_input_size(); ++i) expect_type(this, i, ov::element::f32);
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Norm>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("eps", eps_);
        visitor.on_attribute("inputs", inputs_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape& shape = inputs[0].get_shape();
        outputs[0].set_shape(shape);
        OPENVINO_ASSERT(inputs[1].get_size() == shape.back(), "the norm weight has ", inputs[1].get_size(),
                        " elements: expected ", shape.back());
        run_kernel(NormArgs{inputs[0].data<const float>(),
                            static_cast<int64_t>(inputs[0].get_size() / shape.back()),
                            static_cast<int64_t>(shape.back()),
                            inputs[1].data<const float>(),
                            optional_.data<float>(inputs, kNormBias, shape.back()),
                            eps_,
                            optional_.data<float>(inputs, kResidual, inputs[0].get_size()),
                            outputs[0].data<float>()});
    }

  private:
    float eps_ = 1e-5f;
    std::string inputs_;
    OptionalInputs optional_;  // of inputs_, when the node is validated
};

}  // namespace redraft
