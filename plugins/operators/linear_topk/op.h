#pragma once

#include "../linear/projection_op.h"

namespace redraft {

class LinearTopK : public ProjectionOp {
  public:
    OPENVINO_OP("LinearTopK", "redraft.cpu", ov::op::Op);
    using ProjectionOp::ProjectionOp;

    void validate_and_infer_types() override {
        const ov::PartialShape shape{check_projection(Activation::none), k_};
        set_output_type(0, ov::element::f32, shape);
        set_output_type(1, ov::element::i32, shape);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<LinearTopK>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("k", k_);
        return ProjectionOp::visit_attributes(visitor);
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        LinearTopKArgs args{projection(inputs), optional_.data<int32_t>(inputs, kIds), k_, nullptr, nullptr};
        for (ov::Tensor& output : outputs)
            output.set_shape({static_cast<std::size_t>(args.p.rows), static_cast<std::size_t>(k_)});
        args.values = outputs[0].data<float>();
        args.indices = outputs[1].data<int32_t>();
        run_kernel(args);
    }

  private:
    int64_t k_ = 0;
};

}  // namespace redraft
