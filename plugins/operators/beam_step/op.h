#pragma once

#include <array>

#include "../../cpu/openvino_op.h"

namespace redraft {

class BeamStep : public Operator {
  public:
    OPENVINO_OP("BeamStep", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == 2 || get_input_size() == 6, get_friendly_name(), " has ", get_input_size(),
                        " inputs: expected values, ids and, behind the first level, four of the step before's results");
        const ov::element::Type f32 = ov::element::f32, i32 = ov::element::i32;
        const ov::element::Type inputs[] = {f32, i32, i32, f32, i32, i32}, outputs[] = {i32, f32, i32, i32, i32, i32};
        const int64_t ranks[] = {2, 2, 4, 4, 3, 2};
        for (std::size_t i = 0; i < get_input_size(); ++i) {
            expect_type(this, i, inputs[i]);
            OPENVINO_ASSERT(get_input_partial_shape(i).rank() == ranks[i], get_friendly_name(), ": input ", i,
                            " has shape ", get_input_partial_shape(i), ": expected ", ranks[i], " dimensions");
        }
        const auto shapes = output_shapes(get_input_partial_shape(0), get_input_partial_shape(draft_input()));
        set_output_size(shapes.size());
        for (std::size_t i = 0; i < shapes.size(); ++i) set_output_type(i, outputs[i], shapes[i]);
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<BeamStep>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("width", width_);
        return true;
    }
    int64_t rows_input(std::size_t output) const override { return output < 4 ? draft_input() : kUnknownRows; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto shapes = output_shapes(inputs[0].get_shape(), inputs[draft_input()].get_shape());
        for (std::size_t i = 0; i < shapes.size(); ++i) outputs[i].set_shape(shapes[i]);
        const ov::Shape values = inputs[0].get_shape(), draft = outputs[0].get_shape();
        BeamStepArgs args{};
        args.values = inputs[0].data<const float>();
        args.ids = inputs[1].data<const int32_t>();
        args.rows = static_cast<int64_t>(values[0]);
        args.k = static_cast<int64_t>(values[1]);
        args.sequences = static_cast<int64_t>(draft[0]);
        args.levels = static_cast<int64_t>(draft[1]) - 1;
        args.width = width_;
        if (args.levels) {
            args.candidates = inputs[2].data<const int32_t>();
            args.log_probs = inputs[3].data<const float>();
            args.parents = inputs[4].data<const int32_t>();
            args.chosen = inputs[5].data<const int32_t>();
        }
        args.next_candidates = outputs[0].data<int32_t>();
        args.next_log_probs = outputs[1].data<float>();
        args.next_parents = outputs[2].data<int32_t>();
        args.next_chosen = outputs[3].data<int32_t>();
        args.tokens = outputs[4].data<int32_t>();
        args.origins = outputs[5].data<int32_t>();
        run_kernel(args);
    }

  private:
    // The input that has a row for each sequence: the draft or, at the first level, the values.
    std::size_t draft_input() const { return get_input_size() == 2 ? 0 : 2; }
    template <class Shape>
    std::array<Shape, 6> output_shapes(const Shape& values, const Shape& draft) const {
        using Size = typename Shape::value_type;
        const Size batch = draft[0], levels = draft_input() ? draft[1] + 1 : Size(1), k = values[1], width(width_);
        const Shape candidates{batch, levels, width, k}, nodes{batch * width};
        return {candidates, candidates, Shape{batch, levels, width}, Shape{batch, width}, nodes, nodes};
    }
    int64_t width_ = 0;
};

}  // namespace redraft
